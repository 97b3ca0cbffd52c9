"""The device of this process: its type by the name that `init_distributed` received, its index by LOCAL_RANK.

Each mistake is refused here, with what this machine has: a name that torch does not know, a device without a backend of
torch.distributed, a LOCAL_RANK beyond the devices, two processes on one device.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
from contextlib import suppress

import torch
import torch.distributed as dist

from ... import accelerator
from ...torch_internals.distributed import default_store
from ..rank_selection import XLA

__all__ = ["backend_of", "claim", "device_type", "select", "select_early", "types_of_machine"]

_PACKAGES = {  # device type -> how torch gets to know it
    "neuron": "install torch-neuronx (TorchNeuron) on a Trn2 or Trn3 instance, which registers it with torch; on Trn1 "
    "use device 'xla'",
    "tpu": "install torch_tpu on a TPU host, and import it before this call",
}

# Several processes may share a CPU. NCCL names the two ranks of one GPU itself; MPS is reached through gloo.
_SHARED = ("cpu", "cuda", "mps", XLA)
_VISIBLE = re.compile(r"VISIBLE_(DEVICES|CORES|CHIPS)$|^ZE_AFFINITY_MASK$")


def device_type(name: str) -> str:
    """Returns the device type that a name stands for; of "auto": this machine's accelerator, or "cpu".

    Raises:
        ValueError: torch does not know the name, the name has an index, or this machine has no such device.
    """
    if name == "auto":
        return accelerator.current_type() or "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        remedy = _PACKAGES.get(name.partition(":")[0], "import the package of the device first, if it has one")
        raise ValueError(
            f"device {name!r} is unknown to torch {torch.__version__}: use one that this machine has "
            f"({', '.join(types_of_machine())}), or {remedy}"
        ) from error
    chosen, module = device.type, accelerator.module_of(device.type)
    if device.index is not None:
        raise ValueError(
            f"device {name!r} has an index: pass {chosen!r}; the index is the environment variable LOCAL_RANK, which "
            "torchrun sets"
        )
    if chosen != "cpu" and hasattr(module, "is_available") and not module.is_available():
        others = [other for other in types_of_machine() if other != chosen]
        raise ValueError(
            f"device {chosen} was requested, but torch.{chosen}.is_available() is False; use device "
            f"{' or '.join(others)}"
        )
    return chosen


def types_of_machine() -> list[str]:
    """Returns the device types that this machine has: "cpu", its accelerator, and "xla" if torch_xla is installed."""
    types = ["cpu", accelerator.current_type(), XLA if importlib.util.find_spec("torch_xla") is not None else None]
    return [name for name in types if name is not None]


def backend_of(device_type: str) -> str:
    """Returns the backend of torch.distributed for a device type: gloo for "cpu", NCCL for "cuda".

    Raises:
        ValueError: no backend is registered for it.
    """
    try:
        return str(dist.get_default_backend_for_device(device_type))
    except ValueError as error:
        backends = ", ".join(f"{device} ({name})" for device, name in dist.Backend.default_device_backend_map.items())
        raise ValueError(
            f"device {device_type!r} has no backend of torch.distributed; devices with one: {backends}. Import the "
            f"package that registers one (torch.distributed.Backend.register_backend(..., devices=[{device_type!r}])) "
            "before this call, or use device 'cpu'"
        ) from error


def select_early(device_type: str) -> torch.device | None:
    """Selects a device that torch itself contains, as NCCL needs it; None: it is selected after `init_process_group`.

    The runtime of a device outside torch starts with the process group.
    """
    return select(device_type) if accelerator.in_torch(device_type) else None


def select(device_type: str) -> torch.device:
    """Makes the device with index LOCAL_RANK this process's current one, and returns it.

    For a device that torch itself does not contain, call it after `init_process_group`.

    Raises:
        ValueError: LOCAL_RANK is no number below the number of devices.
    """
    if device_type in ("cpu", XLA):
        return torch.device(device_type)
    text = os.environ.get("LOCAL_RANK", "0")
    if not text.isdecimal():
        raise ValueError(f"the environment variable LOCAL_RANK is {text!r}: it must be the index of a device, from 0")
    index, module = int(text), accelerator.module_of(device_type)
    device = torch.device(device_type, index)
    if not accelerator.in_torch(device_type) and accelerator.current_device(device_type) == device:
        return device  # the backend chose it; its runtime may count other devices than this process may use
    if hasattr(module, "device_count") and index >= (count := module.device_count()):
        devices = f"{count} {device_type} device" + ("s" if count != 1 else "")
        raise ValueError(
            f"LOCAL_RANK is {index}, but this process sees {devices}: start at most {count} processes on this machine "
            f"(torchrun --nproc-per-node {count}), or change the environment variables that hide devices "
            f"({', '.join(_visibility()) or 'none is set'})"
        )
    if hasattr(module, "set_device"):
        module.set_device(device)
    return device


def claim(device: torch.device) -> None:
    """Registers that this process computes on a device, for devices that one process at a time can use.

    Raises:
        ValueError: another process of the job, on the same host, has registered the same device.
    """
    if device.type in _SHARED or dist.get_world_size() == 1:
        return
    place = f"{socket.gethostname()} {' '.join(_visibility())} {device}"
    value = f"{dist.get_rank()} (process {os.getpid()})"
    first = value
    with suppress(RuntimeError, NotImplementedError):  # a store that holds nothing (torch's FakeStore)
        first = default_store().compare_set(f"neuronx_dist/devices/{place}", "", value).decode()
    if first != value:
        raise ValueError(
            f"ranks {first} and {value} on host {socket.gethostname()} both use {device}, which takes one process: "
            "start them with torchrun or neuronx-dist run, which set a different LOCAL_RANK for each process of a host"
        )


def _visibility() -> list[str]:
    """Returns the environment variables, with values, by which a process sees only some devices."""
    return sorted(f"{name}={value}" for name, value in os.environ.items() if _VISIBLE.search(name))

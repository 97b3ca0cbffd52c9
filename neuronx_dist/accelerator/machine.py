"""The accelerator of this machine, and the module that torch, or the package of a device, registers for a device type.

TorchNeuron's runtime may not be used before `torch.distributed.init_process_group`. Here only `is_available` and
`is_initialized` of a device's module are called before that, unless torch itself contains the device (`in_torch`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from ..torch_internals.distributed import default_group, device_types
from ..torch_internals.tensors import DisableTorchFunction

__all__ = [
    "autocast_sums_stay_wide",
    "current_device",
    "current_type",
    "has_double",
    "in_torch",
    "in_use",
    "module_of",
    "updates_lists",
]

_IN_TORCH = ("cpu", "cuda", "xpu", "mps", "mtia")  # torch contains their modules


def current_type() -> str | None:
    """Returns the type of this machine's accelerator; None: it has none. No runtime is started."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return None
    return device.type if _is_available(module_of(device.type)) else None


def current_device(device_type: str) -> torch.device:
    """Returns the device of a type that this process computes on, with its index where there can be several."""
    module = module_of(device_type)
    if device_type == "cpu" or not hasattr(module, "current_device"):
        return torch.device(device_type)
    return torch.device(device_type, module.current_device())


def in_torch(device_type: str) -> bool:
    """Returns whether torch itself contains a device type, so that its devices may be counted and chosen at any time.

    Of other devices, only `init_process_group` may start the runtime.
    """
    return device_type in _IN_TORCH


def in_use() -> str | None:
    """Returns the type of the accelerator whose runtime this process has started; None: there is none.

    A module without `is_initialized` counts as started when the job's process group communicates its tensors.
    """
    device = torch.accelerator.current_accelerator()
    module = None if device is None else module_of(device.type)
    if device is None or module is None:
        return None
    if hasattr(module, "is_initialized"):
        return device.type if module.is_initialized() else None
    return device.type if _communicates(device.type) and _is_available(module) else None


def module_of(device_type: str) -> Any:
    """Returns the module with the functions of a device type (`torch.cuda`); None for "xla" and others without one."""
    return getattr(torch, device_type, None)  # `torch.get_device_module`, which raises if there is none


def _communicates(device_type: str) -> bool:
    """Returns whether the job's process group communicates tensors of a device type, by the group or by its backend.

    A group that a package makes in place of torch's names no devices, from torch 2.15 on.
    """
    if not dist.is_initialized():
        return False
    types = {device.type for device in device_types(default_group())}
    return device_type in types or dist.get_backend() == dist.Backend.default_device_backend_map.get(device_type)


def _is_available(module: Any) -> bool:
    return hasattr(module, "is_available") and bool(module.is_available())


def autocast_sums_stay_wide(device_type: str) -> bool:
    """Returns whether autocast is on for a device type, and leaves sums of half precision in float32, as on CUDA."""
    if device_type == "cpu" or not torch.amp.is_autocast_available(device_type):
        return False
    return torch.is_autocast_enabled(device_type) and (device_type == "cuda" or _sums_are_wide(device_type))


def has_double(device_type: str) -> bool:
    """Returns whether sums on a device type can be computed in float64."""
    return device_type in ("cpu", "cuda", "meta")


def updates_lists(device_type: str) -> bool:
    """Returns whether torch's optimizers update parameters of a device type as lists by default (foreach)."""
    outside = module_of(device_type) is not None and not in_torch(device_type)
    return device_type in ("cuda", "xpu", "mtia") or outside


@cache
def _sums_are_wide(device_type: str) -> bool:
    with DisableTorchFunction(), torch.no_grad(), torch.autocast(device_type):
        return torch.zeros(1, dtype=torch.bfloat16, device=device_type).sum().dtype is torch.float32

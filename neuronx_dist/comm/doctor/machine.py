"""Findings about this machine that need no second process: versions, packages, devices, backends, memory, threads."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from ... import accelerator
from ...torch_internals.versions import TESTED, release
from ..backends import local_device
from .findings import Finding

__all__ = ["backends", "devices", "packages", "shared_memory", "threads", "versions"]

_OLDEST = "2.9"  # of torch
_SHARED = 1 << 30  # bytes of /dev/shm below which loaders of a few processes fail
_EXTRAS = {  # package -> what it is for, how to install it
    "transformers": ("Hugging Face models", "pip install 'transformers>=5.2'"),
    "safetensors": ("weights of Hugging Face models", "pip install safetensors"),
    "s3fs": ("checkpoints on s3://", "pip install s3fs"),
    "matplotlib": ("pictures of `neuronx-dist timeline`", "pip install matplotlib"),
    "torch_xla": (
        "device xla: Trn1, TPU",
        "pip install torch==2.9.0 torch_xla==2.9.0, in an environment of its own",
    ),
}
_AVAILABLE: dict[str, Callable[[], bool]] = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "xccl": dist.is_xccl_available,
    "ucc": dist.is_ucc_available,
    "mpi": dist.is_mpi_available,
}


def versions() -> Iterator[Finding]:
    """Versions of Python, this package and torch, the last against those that the tests ran on."""
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Finding("ok", "neuronx_dist", _version("neuronx_dist") or "not installed: imported from its folder")
    tested, version = ", ".join(TESTED), torch.__version__
    if release(version) < release(_OLDEST):
        yield Finding("failed", "torch", f"{version}, older than {_OLDEST}", f"pip install 'torch>={_OLDEST}'")
    elif release(version) in map(release, TESTED):
        yield Finding("ok", "torch", f"{version}; the tests ran on {tested}")
    else:
        remedy = "the type checker, the recorder and split backward passes depend on private names: compare with those"
        yield Finding("missing", "torch", f"{version}, on which no tests ran; they ran on {tested}", remedy)


def packages() -> Iterator[Finding]:
    """Optional packages."""
    for name, (use, remedy) in _EXTRAS.items():
        if importlib.util.find_spec(name) is None:
            yield Finding("missing", name, f"not installed (for {use})", remedy)
        else:
            yield Finding("ok", name, _version(name) or "installed")


def devices() -> Iterator[Finding]:
    """Devices of this machine. Devices outside torch are not counted, which would start their runtime."""
    yield Finding("ok", "device cpu", f"{_cores()} cores")
    built, found = torch.accelerator.current_accelerator(), accelerator.current_type()
    if found is not None:
        module = accelerator.module_of(found)
        count = "its runtime counts the devices after init_process_group"
        if accelerator.in_torch(found) and hasattr(module, "device_count"):
            count = f"{module.device_count()} visible"
        yield Finding("ok", f"device {found}", f"{count}; init_distributed('auto') takes it")
    elif built is not None:
        remedy = f"look at the driver and at the environment variables that hide devices: torch.{built.type}"
        detail = f"this torch is built for it, but torch.{built.type}.is_available() is False"
        yield Finding("missing", f"device {built.type}", detail, remedy)
    else:
        remedy = "for a GPU install torch's CUDA build; for others the package of the device (docs/devices.md)"
        yield Finding("missing", "accelerator", "torch reaches none: init_distributed('auto') takes the cpu", remedy)


def backends() -> Iterator[Finding]:
    """Backends of torch.distributed in this build, with the devices whose default they are; packages' backends too."""
    defaults = dist.Backend.default_device_backend_map
    names = [
        *_AVAILABLE,
        *(name for name in dist.Backend.backend_list if name not in (*_AVAILABLE, "undefined", "fake")),
    ]
    for name in names:
        if not _AVAILABLE.get(name, lambda: True)():
            continue
        types = [device_type for device_type, backend in defaults.items() if backend == name]
        yield Finding("ok", f"backend {name}", f"default for {', '.join(types)}" if types else "default for no device")
    found = accelerator.current_type()
    if found is not None:
        try:
            local_device.backend_of(found)
        except ValueError as error:
            yield Finding("failed", f"backend for {found}", str(error))


def shared_memory() -> Iterator[Finding]:
    """Size of /dev/shm, through which data loaders pass batches, and NCCL passes messages inside a host."""
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        yield Finding("missing", "/dev/shm", "there is none", "data loaders with workers need it: mount a tmpfs there")
        return
    size, free = (blocks * status.f_frsize for blocks in (status.f_blocks, status.f_bavail))
    detail = f"{size / 2**30:.1f} GiB, {free / 2**30:.1f} GiB free"
    if free < _SHARED:
        remedy = (
            "data loaders with workers and NCCL may fail: docker run --shm-size=8g (or --ipc=host), or remove files"
        )
        yield Finding("missing", "/dev/shm", detail, remedy)
    else:
        yield Finding("ok", "/dev/shm", detail)


def threads() -> Iterator[Finding]:
    """Threads of each process on the CPU."""
    value, cores = os.environ.get("OMP_NUM_THREADS"), _cores()
    if value is None:
        remedy = f"export OMP_NUM_THREADS={cores} divided by the processes of a host, if they compute on the CPU"
        detail = f"not set: torchrun sets it to 1 for several processes, python alone uses {torch.get_num_threads()}"
        yield Finding("missing", "OMP_NUM_THREADS", detail, remedy)
    elif value.isdecimal() and 1 <= int(value) <= cores:
        yield Finding("ok", "OMP_NUM_THREADS", f"{value} of {cores} cores for each process")
    else:
        remedy = f"export OMP_NUM_THREADS={cores} divided by the processes of a host"
        yield Finding("missing", "OMP_NUM_THREADS", f"{value!r}, with {cores} cores", remedy)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

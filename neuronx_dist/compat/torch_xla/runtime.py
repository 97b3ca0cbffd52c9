"""torch_xla.runtime: the ranks of the job. One process has one device."""

from __future__ import annotations

import torch

from .groups import local_device, local_rank, local_size, rank, size

__all__ = [
    "addressable_device_count",
    "addressable_runtime_device_count",
    "device_type",
    "get_num_cached_compilation_graph",
    "global_device_count",
    "global_ordinal",
    "global_runtime_device_count",
    "host_index",
    "initialize_cache",
    "is_bf16_supported",
    "is_spmd",
    "local_device_count",
    "local_ordinal",
    "local_process_count",
    "process_count",
    "process_index",
    "set_device_type",
    "use_spmd",
    "using_pjrt",
    "world_size",
    "xla_device",
]


def world_size() -> int:
    """Returns the number of ranks."""
    return size()


def global_ordinal() -> int:
    """Returns this process's rank."""
    return rank()


def local_ordinal() -> int:
    """Returns this process's index on its host."""
    return local_rank()


def process_count() -> int:
    """Returns the number of ranks: each is a process."""
    return size()


def process_index() -> int:
    """Returns this process's rank."""
    return rank()


def local_process_count() -> int:
    """Returns the number of ranks on this host."""
    return local_size()


def global_device_count() -> int:
    """Returns the number of ranks: each has a device."""
    return size()


def local_device_count() -> int:
    """Returns the number of ranks on this host."""
    return local_size()


def addressable_device_count() -> int:
    """Returns the number of this process's devices: 1."""
    return 1


global_runtime_device_count, addressable_runtime_device_count = global_device_count, addressable_device_count


def host_index() -> int:
    """Returns the number of this host."""
    return rank() // local_size()


def is_bf16_supported() -> bool:
    """Returns True: each device computes in bfloat16."""
    return True


def is_spmd() -> bool:
    """Returns False: a process has one device."""
    return False


def get_num_cached_compilation_graph() -> int:
    """Returns 0: nothing is compiled."""
    return 0


def device_type() -> str:
    """Returns the type of the device, in capitals: "CPU", "CUDA"."""
    return local_device().type.upper()


def set_device_type(pjrt_device: str) -> None:
    """Does nothing: the device is this machine's."""


def using_pjrt() -> bool:
    """Returns True, which scripts take for the present torch_xla."""
    return True


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Returns this rank's device."""
    return local_device()


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Does nothing: nothing is compiled."""


def use_spmd(auto: bool = False) -> None:
    """Refuses torch_xla's SPMD mode, in which one process drives all devices.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "torch_xla.runtime.use_spmd: one process for all devices is a mode of torch_xla alone; start one process for a "
        "device, by torchrun or neuronx-dist run, and shard by neuronx_dist.parallelize or neuronx_dist.shard_tensor"
    )

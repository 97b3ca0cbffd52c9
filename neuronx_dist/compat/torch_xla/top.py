"""torch_xla itself: device, step, launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .groups import local_device
from .runtime import global_device_count as device_count
from .xla_multiprocessing import spawn

__all__ = [
    "__version__",
    "compile",
    "device",
    "device_count",
    "devices",
    "launch",
    "manual_seed",
    "real_devices",
    "step",
    "sync",
]

__version__ = "2.9.0"  # scripts compare it


def device(index: int | None = None) -> torch.device:
    """Returns this rank's device."""
    return local_device()


def devices() -> list[torch.device]:
    """Returns this process's devices: one."""
    return [local_device()]


def real_devices() -> list[str]:
    """Returns the names of this process's devices: one."""
    return [str(local_device())]


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    """Does nothing: operators have run already."""


@contextmanager
def step() -> Iterator[None]:
    """Contains a step, at whose end there is nothing to do."""
    yield


def compile(
    f: Callable[..., Any] | None = None,
    full_graph: bool | None = False,
    name: str | None = None,
    max_different_graphs: int | None = None,
) -> Any:
    """Returns the function, which runs as it is; without one a context, or decorator, that does nothing."""
    return step() if f is None else f


def manual_seed(seed: int, device: Any = None) -> None:
    """Seeds torch's generators."""
    torch.manual_seed(seed)


def launch(
    fn: Callable[..., Any], args: Sequence[Any] = (), start_method: str = "spawn", debug_single_process: bool = False
) -> Any:
    """Calls `fn(index, *args)` in a process for each device, or in this one."""
    return spawn(fn, args, nprocs=1 if debug_single_process else None, start_method=start_method)

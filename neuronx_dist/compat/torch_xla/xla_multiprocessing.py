"""torch_xla.distributed.xla_multiprocessing: `spawn`, for scripts that are started without torchrun."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.spawn import start_processes

from ... import comm
from ...comm.backends.local_device import device_type
from .groups import rank, size
from .xla_model import rendezvous

__all__ = ["MpModelWrapper", "MpSerialExecutor", "spawn"]


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> Any:
    """Calls `fn(index, *args)` in a process for each device, in a job whose process group is made.

    Args:
        nprocs: number of processes; None: the machine's accelerators, or 1 on the CPU. A script that needs more ranks
            on the CPU is started by torchrun or `neuronx-dist run`.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a process raised, with its traceback; the others are ended.
    """
    if "RANK" in os.environ:  # torchrun started this process: it is one of the ranks
        comm.launch.init_distributed()
        return fn(int(os.environ.get("LOCAL_RANK", "0")), *args)
    device = device_type("auto")
    count = nprocs or (1 if device == "cpu" else torch.accelerator.device_count())
    if count == 1:
        comm.launch.init_distributed()
        return fn(0, *args)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return start_processes(_rank, (fn, tuple(args), count, port), count, join, daemon, start_method)


def _rank(index: int, fn: Callable[..., Any], args: tuple[Any, ...], count: int, port: int) -> None:
    os.environ.update(
        RANK=str(index),
        LOCAL_RANK=str(index),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    comm.launch.init_distributed()
    fn(index, *args)


class MpModelWrapper:
    """Holds a model that processes of `spawn` share, and moves it: `MpModelWrapper(model).to(device)`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Any) -> torch.nn.Module:
        """Returns the model, moved to a device."""
        return self._model.to(device)


class MpSerialExecutor:
    """Runs a function on one rank after the other: to read data that should be prepared once."""

    def run(self, fn: Callable[[], Any]) -> Any:
        """Returns `fn()`, called when the ranks before this one have called it."""
        for turn in range(size()):
            if turn == rank():
                result = fn()
            rendezvous(f"MpSerialExecutor {turn}")
        return result

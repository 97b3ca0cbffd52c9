"""The program of each of the two processes that `neuronx-dist doctor` starts: `python -m ... DEVICE`.

Each call of the backend is tried on a group of its own, so that one that fails leaves the others whole. A line of JSON
goes to stdout before each call and after it: a call without a second line is one that hung.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from ...torch_internals.distributed import default_group
from ..backends.capabilities import Capabilities, capabilities_of, is_missing_call
from ..launch import init_distributed

__all__ = ["CALLS", "REPLACED", "error_of", "main"]

REPLACED = "replaced: "  # before the error of a call that this package replaces (docs/devices.md)

_LIMIT = datetime.timedelta(seconds=8)  # of one call


def _all_reduce(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> bool:
    x = torch.full((3,), dist.get_rank() + 1, dtype=dtype, device=device)
    dist.all_reduce(x, group=group)
    return x.tolist() == [3, 3, 3]


def _all_reduce_float(group: dist.ProcessGroup, device: torch.device) -> bool:
    return _all_reduce(group, device, torch.float32)


def _all_reduce_bfloat16(group: dist.ProcessGroup, device: torch.device) -> bool:
    return _all_reduce(group, device, torch.bfloat16)


def _all_reduce_int64(group: dist.ProcessGroup, device: torch.device) -> bool:
    return _all_reduce(group, device, torch.int64)


def _asynchronous(group: dist.ProcessGroup, device: torch.device) -> bool:
    x = torch.ones(3, device=device)
    work = dist.all_reduce(x, group=group, async_op=True)
    work.wait()
    return x.tolist() == [2, 2, 2]


def _all_gather(group: dist.ProcessGroup, device: torch.device) -> bool:
    parts = [torch.zeros(2, device=device) for _ in range(2)]
    dist.all_gather(parts, torch.full((2,), float(dist.get_rank()), device=device), group=group)
    return [part.tolist() for part in parts] == [[0, 0], [1, 1]]


def _reduce_scatter(group: dist.ProcessGroup, device: torch.device) -> bool:
    part = torch.zeros(2, device=device)
    dist.reduce_scatter(part, [torch.full((2,), float(index), device=device) for index in range(2)], group=group)
    return part.tolist() == [2 * dist.get_rank()] * 2


def _messages(group: dist.ProcessGroup, device: torch.device) -> bool:
    rank = dist.get_rank()
    x = torch.full((3,), float(rank), device=device)
    if rank == 0:
        dist.send(x, 1, group=group)
        dist.recv(x, 1, group=group)
    else:
        y = torch.zeros_like(x)
        dist.recv(y, 0, group=group)
        dist.send(x, 0, group=group)
        x = y
    return x.tolist() == [1 - rank] * 3


def _uneven_all_to_all(group: dist.ProcessGroup, device: torch.device) -> bool:
    rank = dist.get_rank()
    sent = torch.arange(3.0, device=device) + 10 * rank  # rank 0 keeps 1 and sends 2, rank 1 sends 2 and keeps 1
    sizes = [1, 2] if rank == 0 else [2, 1]
    received = torch.zeros(3, device=device)
    dist.all_to_all_single(received, sent, sizes, sizes, group=group)
    return received.tolist() == ([0, 10, 11] if rank == 0 else [1, 2, 12])


def _barrier(group: dist.ProcessGroup, device: torch.device) -> bool:
    dist.barrier(group)
    return True


CALLS: dict[str, Callable[[dist.ProcessGroup, torch.device], bool]] = {
    "all_reduce": _all_reduce_float,
    "all_reduce of bfloat16": _all_reduce_bfloat16,
    "all_reduce of int64": _all_reduce_int64,
    "asynchronous all_reduce": _asynchronous,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "send and recv": _messages,
    "all_to_all of unequal parts": _uneven_all_to_all,
    "barrier of a sub-group": _barrier,
}
_METHODS = {
    "all_gather": {"allgather"},
    "reduce_scatter": {"reduce_scatter"},
    "send and recv": {"send", "recv"},
} | dict.fromkeys((name for name in CALLS if "all_reduce" in name), {"allreduce"})


def main(device_type: str) -> None:
    """Tries all calls; prints `[name, None]` before each, and `[name, error]` after it, an empty one if it worked."""
    _say("init_process_group", None)
    device = init_distributed(device_type, timeout=_LIMIT.total_seconds())
    _say("init_process_group", "")
    for name in CALLS:
        _say(name, None)
        _say(name, error_of(name, device))
    sys.stdout.flush()
    os._exit(0)  # groups whose calls have failed may wait for the other process when they are destroyed


def error_of(name: str, device: torch.device) -> str:
    """Returns the first line of a call's error, empty if the call worked; after `REPLACED`, if jobs run without it."""
    try:
        return "" if CALLS[name](dist.new_group([0, 1], timeout=_LIMIT), device) else "wrong result"
    except Exception as error:
        text = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        is_replaced = _is_replaced(name, capabilities_of(default_group()), error)
    return f"{REPLACED}{text}" if is_replaced else text


def _is_replaced(name: str, capabilities: Capabilities, error: Exception) -> bool:
    if name == "barrier of a sub-group":  # `comm.barrier` gathers objects
        return is_missing_call(error)
    if name == "all_to_all of unequal parts":
        return not (capabilities.has("all_to_all") and capabilities.unequal_all_to_all)
    return capabilities.has("all_gather") and not _METHODS[name] <= capabilities.methods


def _say(name: str, error: str | None) -> None:
    print(json.dumps([name, error]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

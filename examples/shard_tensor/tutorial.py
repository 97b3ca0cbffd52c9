"""Common code of this folder's scripts: sizes from the command line, seconds, comparison, and the report of a rank."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from neuronx_dist.shard_tensor import DistributedManager, ShardTensor
from neuronx_dist.shard_tensor.report import Report

_Size = TypeVar("_Size")


def size_of(laptop: _Size, full: _Size) -> tuple[_Size, bool]:
    """The size that `--size` chooses, and whether it is small enough to be computed in one process as well."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "--size", choices=("laptop", "full"), default="laptop", help="full: that of the tutorial; default: laptop"
    )
    chosen = parser.parse_args().size
    return (full, False) if chosen == "full" else (laptop, True)


def positive(text: str) -> int:
    """The number of a command line's argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def say(text: object) -> None:
    """Prints on rank 0."""
    if not DistributedManager.is_initialized() or DistributedManager().rank == 0:
        print(text, flush=True)


def seconds(function: Callable[[], Any], repeats: int = 3) -> float:
    """Seconds of one call, after a warm-up call."""
    function()
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - began) / repeats


def expect_equal(what: str, actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Stops the script where a result is not that of one process. A ShardTensor is gathered for it."""
    if isinstance(actual, ShardTensor):
        actual = actual.full_tensor()
    difference = float((actual - expected).detach().abs().max())
    if not (actual.shape == expected.shape and difference <= tolerance * (1 + float(expected.abs().max()))):
        raise SystemExit(f"{what}: differs from one process by {difference:.3g}, more than {tolerance:g}")
    say(f"{what}: equal to one process")


def expect_traffic(r: Report, verbs: dict[str, int], num_bytes: int | None = None) -> None:
    """Prints what this rank has communicated, and stops the script where it is anything else."""
    actual: dict[str, int] = {}
    for call in r.calls:
        actual[call.call.verb] = actual.get(call.call.verb, 0) + 1
    say(r)
    if actual != verbs or (num_bytes is not None and r.bytes != num_bytes) or r.gathers:
        raise SystemExit(f"expected {verbs} with {num_bytes} bytes and nothing gathered, but there was:\n{r}")

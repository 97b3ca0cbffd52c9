"""The one point that every collective passes: tests count collectives here (`scopes.record`), tools read costs."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

__all__ = ["Call", "Recorder", "attach", "detach", "note", "recorder", "shape_of"]


class Group(Protocol):
    """Data of a communicator that a record contains."""

    axis: str
    global_rank: int

    @property
    def size(self) -> int: ...


class Call(NamedTuple):
    """One collective that a rank issued, or its end.

    The verb of an end is `wait:all_reduce` after the wait for an asynchronous collective, `end:all_reduce` otherwise.
    """

    verb: str
    axis: str
    op: str | None
    shape: tuple[int, ...]  # shape of this rank's input (`recv`: of its result); see `shape_of`
    dtype: torch.dtype  # dtype on the wire
    bytes: int  # bytes of the larger one of input and result, which bounds the time
    group_size: int
    messages: int = 0  # of exchange, all_to_all and send: those that this rank sends to another one


class Recorder(Protocol):
    """Observer of collectives.

    Attributes:
        rank: whose collectives are reported; None: those of every rank of this process.
    """

    @property
    def rank(self) -> int | None: ...

    def add(self, call: Call) -> None:
        """Receives a collective, in its thread: at its start, and after its end."""


class _Calls:
    def __init__(self, rank: int | None, waits: bool) -> None:
        self.rank = rank
        self.waits = waits
        self.calls: list[Call] = []

    def add(self, call: Call) -> None:
        if ":" not in call.verb or (self.waits and call.verb.startswith("wait:")):
            self.calls.append(call)


# Read on every collective: testing the empty tuple is the whole cost when nothing records. Replaced, never changed:
# other threads iterate over it.
recorders: tuple[Recorder, ...] = ()
_changing = threading.Lock()


def note(
    communicator: Group,
    verb: str,
    x: torch.Tensor | Sequence[torch.Tensor],
    *,
    op: str | None = None,
    dtype: torch.dtype | None = None,
    scale: int = 1,
    messages: int = 0,
) -> None:
    """Reports a collective to this rank's recorders. `scale`: the ratio of the larger side to `x`."""
    shape, dtype = shape_of(x), dtype or (x if isinstance(x, torch.Tensor) else x[0]).dtype
    size = 0 if ":" in verb else math.prod(shape) * dtype.itemsize * scale
    call = Call(verb, communicator.axis, op, shape, dtype, size, communicator.size, messages)
    for recorder in recorders:
        if recorder.rank is None or recorder.rank == communicator.global_rank:
            recorder.add(call)


def shape_of(x: torch.Tensor | Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Returns the shape of a tensor; for tensors that travel together the number of elements, `[n]`."""
    return tuple(x.shape) if isinstance(x, torch.Tensor) else (sum(part.numel() for part in x),)


def attach(recorder: Recorder) -> None:
    """Starts reporting collectives to `recorder`."""
    global recorders
    with _changing:
        recorders = (*recorders, recorder)


def detach(recorder: Recorder) -> None:
    """Stops reporting collectives to `recorder`."""
    global recorders
    with _changing:
        recorders = tuple(other for other in recorders if other is not recorder)


@contextmanager
def recorder(rank: int | None, *, waits: bool) -> Iterator[list[Call]]:
    """Collects the collectives of `rank` (None: of all ranks of this process); users call `scopes.record`."""
    new = _Calls(rank, waits)
    attach(new)
    try:
        yield new.calls
    finally:
        detach(new)

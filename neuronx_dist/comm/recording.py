"""The one point that every collective passes. Tests count with it (`scopes.record`), tools read costs from it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

__all__ = ["Call", "Recorder", "attach", "detach", "note", "recorder", "shape_of"]


class Group(Protocol):
    """What a record says of a communicator."""

    axis: str
    global_rank: int

    @property
    def size(self) -> int: ...


class Call(NamedTuple):
    """One collective as a rank issued it, or its end.

    The verb of an end is `wait:all_reduce` after the wait for an asynchronous collective, `end:all_reduce` otherwise.
    """

    verb: str
    axis: str
    op: str | None
    shape: tuple[int, ...]  # of this rank's input (`recv`: of its result); see `shape_of`
    dtype: torch.dtype  # on the wire
    bytes: int  # of the larger of input and result, which is what bounds the time
    group_size: int


class Recorder(Protocol):
    """Whoever wants to know of collectives.

    Attributes:
        rank: which rank's; None: those of every rank of this process.
    """

    @property
    def rank(self) -> int | None: ...

    def add(self, call: Call) -> None:
        """Called in the thread of the collective: when it starts, and when it has ended."""


class _Calls:
    def __init__(self, rank: int | None, waits: bool) -> None:
        self.rank = rank
        self.waits = waits
        self.calls: list[Call] = []

    def add(self, call: Call) -> None:
        if ":" not in call.verb or (self.waits and call.verb.startswith("wait:")):
            self.calls.append(call)


# Read on every collective: the empty tuple is the whole cost of not recording. Replaced, never changed: other threads
# iterate over it.
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
) -> None:
    """Tells the active recorders of this rank. `scale`: how much larger the larger side is than `x`."""
    shape, dtype = shape_of(x), dtype or (x if isinstance(x, torch.Tensor) else x[0]).dtype
    size = 0 if ":" in verb else math.prod(shape) * dtype.itemsize * scale
    call = Call(verb, communicator.axis, op, shape, dtype, size, communicator.size)
    for each in recorders:
        if each.rank is None or each.rank == communicator.global_rank:
            each.add(call)


def shape_of(x: torch.Tensor | Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The shape; of several tensors that travel together the number of elements, `[n]`."""
    return tuple(x.shape) if isinstance(x, torch.Tensor) else (sum(part.numel() for part in x),)


def attach(recorder: Recorder) -> None:
    """From now on `recorder` is told of collectives."""
    global recorders
    with _changing:
        recorders = (*recorders, recorder)


def detach(recorder: Recorder) -> None:
    """Ends what `attach` began."""
    global recorders
    with _changing:
        recorders = tuple(other for other in recorders if other is not recorder)


@contextmanager
def recorder(rank: int | None, *, waits: bool) -> Iterator[list[Call]]:
    """Collects what `rank` (None: every rank of this process) communicates; `scopes.record` is the user's form."""
    new = _Calls(rank, waits)
    attach(new)
    try:
        yield new.calls
    finally:
        detach(new)

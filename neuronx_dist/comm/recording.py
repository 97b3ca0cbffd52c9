"""The one point that every collective passes. Tests count with it (`scopes.record`), tools read costs from it."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch

__all__ = ["Call", "note", "recorder", "shape_of"]


class Group(Protocol):
    """What a record says of a communicator."""

    axis: str
    global_rank: int

    @property
    def size(self) -> int: ...


class Call(NamedTuple):
    """One collective, or one wait for an asynchronous one (verb `wait:all_reduce`), as a rank issued it."""

    verb: str
    axis: str
    op: str | None
    shape: tuple[int, ...]  # of this rank's input (`recv`: of its result); see `shape_of`
    dtype: torch.dtype  # on the wire
    bytes: int  # of the larger of input and result, which is what bounds the time
    group_size: int


class _Recorder:
    def __init__(self, rank: int | None, waits: bool) -> None:
        self.rank = rank
        self.waits = waits
        self.calls: list[Call] = []


# Read on every collective: the empty tuple is the whole cost of not recording. Replaced, never changed: other threads
# iterate over it.
recorders: tuple[_Recorder, ...] = ()
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
    size = 0 if verb.startswith("wait:") else math.prod(shape) * dtype.itemsize * scale
    call = Call(verb, communicator.axis, op, shape, dtype, size, communicator.size)
    for each in recorders:
        concerned = each.rank is None or each.rank == communicator.global_rank
        if concerned and (each.waits or not verb.startswith("wait:")):
            each.calls.append(call)


def shape_of(x: torch.Tensor | Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The shape; of several tensors that travel together the number of elements, `[n]`."""
    return tuple(x.shape) if isinstance(x, torch.Tensor) else (sum(part.numel() for part in x),)


@contextmanager
def recorder(rank: int | None, *, waits: bool) -> Iterator[list[Call]]:
    """Collects what `rank` (None: every rank of this process) communicates; `scopes.record` is the user's form."""
    new = _Recorder(rank, waits)
    global recorders
    with _changing:
        recorders = (*recorders, new)
    try:
        yield new.calls
    finally:
        with _changing:
            recorders = tuple(other for other in recorders if other is not new)

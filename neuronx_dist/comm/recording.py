"""The one point that every collective passes: `with record() as calls`. Tests count with it, tools read costs from
it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .base import Communicator

__all__ = ["Call", "record", "shape_of"]


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
    communicator: Communicator,
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
    for recorder in recorders:
        if recorder.rank is None or recorder.rank == communicator.global_rank:
            if recorder.waits or not verb.startswith("wait:"):
                recorder.calls.append(call)


def shape_of(x: torch.Tensor | Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The shape; of several tensors that travel together the number of elements, `[n]`."""
    return tuple(x.shape) if isinstance(x, torch.Tensor) else (sum(part.numel() for part in x),)


@contextmanager
def record(*, waits: bool = False, all_ranks: bool = False) -> Iterator[list[Call]]:
    """Collects the collectives which this rank issues, in order, backward passes in other threads included.

    Args:
        waits: also record when an asynchronous collective is awaited.
        all_ranks: record every rank of this process (ranks as threads), not the current one alone.
    """
    from .context import current, is_initialized

    recorder = _Recorder(None if all_ranks or not is_initialized() else current().rank, waits)
    global recorders
    with _changing:
        recorders = (*recorders, recorder)
    try:
        yield recorder.calls
    finally:
        with _changing:
            recorders = tuple(other for other in recorders if other is not recorder)

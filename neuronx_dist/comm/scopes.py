"""Changes for the time of a `with` statement, in this thread: the rank (`as_rank`), recording (`record`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..mesh import Mesh
from . import backends, recording
from .base import Backend
from .context import Context, current, is_initialized, use
from .ranks.rank_numbers import RankNumber
from .recording import Call

__all__ = ["as_rank", "record"]


@contextmanager
def as_rank(mesh: Mesh, rank: int, backend: Backend | None = None) -> Iterator[Context]:
    """Plays `rank` of `mesh` in this thread. Without a backend collectives only return tensors of the right shape.

    Example:
        >>> with as_rank(Mesh(4, tp=2, pp=2), rank=3):
        ...     layer = ColumnParallelLinear(8, 16, device="meta")
    """
    if backend is None:
        backend = (
            backends.observed.CheckBackend(silent=True)
            if isinstance(rank, RankNumber)
            else backends.shapes.ShapesBackend()
        )
    with use(Context(mesh, rank, backend)) as context:
        yield context


@contextmanager
def record(*, waits: bool = False, all_ranks: bool = False) -> Iterator[list[Call]]:
    """Collects the collectives which this rank issues, in order, backward passes in other threads included.

    Args:
        waits: also record when an asynchronous collective is awaited.
        all_ranks: record every rank of this process (ranks as threads), not the current one alone.
    """
    rank = None if all_ranks or not is_initialized() else current().rank
    with recording.recorder(rank, waits=waits) as calls:
        yield calls

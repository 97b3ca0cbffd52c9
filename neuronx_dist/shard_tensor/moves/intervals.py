"""Plans of the positions of a sharded dim that each rank needs: for all ranks, from sizes alone, without communication.

A dim of n positions is owned in shards: `bounds = (0, .., n)`, nondecreasing, so that rank r owns `bounds[r]` up to
`bounds[r + 1]`; empty shards are allowed. What a rank needs is a list of runs of positions. Runs are cut at the bounds
into pieces, each owned by one rank. From the pieces of all ranks follows what each sends, to whom, and what comes, so
that no rank has to ask another one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

__all__ = [
    "FILL",
    "PADDING_MODES",
    "Bounds",
    "Piece",
    "ExchangePlan",
    "RankPlan",
    "Run",
    "bounds_of",
    "cut",
    "divided",
    "flipped",
    "part",
    "repartition",
    "rolled",
    "virtual_runs",
]

Bounds = tuple[int, ...]
FILL = -1  # the start of a run, or owner of a piece, that has no source: the fill value
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


class Run(NamedTuple):
    """Positions `start, start + step, ..`, `length` of them; or `length` times the fill value."""

    start: int
    step: int
    length: int


class Piece(NamedTuple):
    """The part of a run that one rank owns.

    Attributes:
        owner: group index of the rank that owns it, or FILL.
        start: the first position, in the owner's shard.
        offset: where it begins in the result.
    """

    owner: int
    start: int
    step: int
    length: int
    offset: int

    @property
    def rows(self) -> int:
        """The number of positions that are sent: one, if it is repeated."""
        return self.length if self.step else 1


Needs = tuple[tuple[Run, ...], ...]  # by rank


class RankPlan(NamedTuple):
    """The part of one rank in a plan.

    Attributes:
        size: positions of its shard.
        length: positions of its result.
        pieces: of its result, in order.
        sends: for each rank, the pieces of that rank's result which this one owns, in order; none for itself.
        sent: for each rank, the positions that go there.
        received: for each rank, the positions that come from there.
        is_identity: whether its result is its shard.
    """

    size: int
    length: int
    pieces: tuple[Piece, ...]
    sends: tuple[tuple[Piece, ...], ...]
    sent: tuple[int, ...]
    received: tuple[int, ...]
    is_identity: bool


class ExchangePlan:
    """The positions of a sharded dim that every rank needs, and their senders.

    Args:
        bounds: `(0, .., n)`, of the shards.
        needs: for each rank the runs of its result, in order.

    Attributes:
        pieces: for each rank those of its result.
        is_local: whether no rank needs what another one owns.
    """

    def __init__(self, bounds: Bounds, needs: Sequence[Iterable[Run]]) -> None:
        self.bounds = bounds
        self.pieces = tuple(tuple(cut(runs, bounds)) for runs in needs)
        self.is_local = all(piece.owner in (rank, FILL) for rank, pieces in enumerate(self.pieces) for piece in pieces)
        self._ranks: dict[int, RankPlan] = {}

    def of(self, rank: int) -> RankPlan:
        """Returns the part of the rank with group index `rank`."""
        if rank not in self._ranks:
            self._ranks[rank] = self._of(rank)
        return self._ranks[rank]

    def _of(self, rank: int) -> RankPlan:
        pieces_of_rank = self.pieces[rank]
        sends = tuple(
            tuple(piece for piece in pieces if piece.owner == rank and dst != rank)
            for dst, pieces in enumerate(self.pieces)
        )
        received = [0] * len(self.pieces)
        for piece in pieces_of_rank:
            if piece.owner not in (rank, FILL):
                received[piece.owner] += piece.rows
        size = self.bounds[rank + 1] - self.bounds[rank]
        length = sum(piece.length for piece in pieces_of_rank)
        is_identity = pieces_of_rank == (Piece(rank, 0, 1, size, 0),) or not (size or length)
        sent = tuple(sum(piece.rows for piece in pieces) for pieces in sends)
        return RankPlan(size, length, pieces_of_rank, sends, sent, tuple(received), is_identity)

    @property
    def is_identity(self) -> bool:
        """Returns whether every rank's result is its shard."""
        return all(self.of(rank).is_identity for rank in range(len(self.pieces)))

    def rows(self, rank: int) -> int:
        """Counts the positions that a rank sends or receives, whichever are more. In backward the two change places.

        The bytes of an exchange, as `comm.record` has them, are this times the bytes of a position.
        """
        plan = self.of(rank)
        return max(sum(plan.sent), sum(plan.received))


def cut(runs: Iterable[Run], bounds: Bounds) -> list[Piece]:
    """Cuts runs into pieces, in order.

    >>> cut([Run(FILL, 0, 1), Run(0, 1, 5)], (0, 3, 8))
    [Piece(owner=-1, start=0, step=0, length=1, offset=0), Piece(owner=0, start=0, step=1, length=3, offset=1), \
Piece(owner=1, start=0, step=1, length=2, offset=4)]
    """
    pieces: list[Piece] = []
    offset = 0
    for start, step, length in runs:
        if length == 0:
            continue
        if start == FILL:
            pieces.append(Piece(FILL, 0, 0, length, offset))
            offset += length
            continue
        while length:
            owner = bisect_right(bounds, start) - 1  # of equal bounds the last: empty shards own nothing
            if not 0 <= owner < len(bounds) - 1:
                raise ValueError(f"position {start} is out of range: bounds {bounds} cover {bounds[-1]} positions")
            low, high = bounds[owner], bounds[owner + 1]
            count = length
            if step > 0:
                count = min(length, -(-(high - start) // step))
            elif step < 0:
                count = min(length, (start - low) // -step + 1)
            pieces.append(Piece(owner, start - low, step, count, offset))
            start, length, offset = start + count * step, length - count, offset + count
    return pieces


def virtual_runs(begin: int, end: int, size: int, mode: str = "zeros") -> tuple[Run, ...]:
    """Returns the sources of positions `begin` to `end` of a dim of `size` that is padded without end on both sides.

    Args:
        mode: as `torch.nn.Conv1d(padding_mode=)`: zeros (here: the fill value), reflect, replicate, circular.

    Raises:
        ValueError: there is nothing to reflect so far outside, or nothing at all.
    """
    if mode not in PADDING_MODES:
        raise ValueError(f"padding mode {mode!r}: use one of {', '.join(PADDING_MODES)}")
    if begin >= end:
        return ()
    if mode != "zeros" and (begin < 0 or end > size) and size == 0:
        raise ValueError(f"padding mode {mode!r} needs values to repeat, but the dim is empty")
    if mode == "reflect" and (begin <= -size or end > 2 * size - 1) and (begin < 0 or end > size):
        raise ValueError(
            f"padding mode 'reflect' of a dim of {size}: positions {begin} to {end - 1} are beyond the reflections, "
            f"which cover {1 - size} to {2 * size - 2}: use less padding"
        )
    if mode == "circular":
        runs, position = [], begin
        while position < end:
            start = position % size
            runs.append(Run(start, 1, min(size - start, end - position)))
            position += runs[-1].length
        return tuple(runs)
    before, after = max(0, min(0, end) - begin), max(0, end - max(size, begin))
    inside = (end - after) - (begin + before)
    after_from = end - after
    if mode == "zeros":
        left, right = Run(FILL, 0, before), Run(FILL, 0, after)
    elif mode == "replicate":
        left, right = Run(0, 0, before), Run(size - 1, 0, after)
    else:
        left, right = Run(-begin, -1, before), Run(2 * (size - 1) - after_from, -1, after)
    return tuple(run for run in (left, Run(begin + before, 1, inside), right) if run.length)


def part(runs: Iterable[Run], begin: int, end: int) -> tuple[Run, ...]:
    """Returns the runs at the places `begin` to `end` of a list of runs."""
    result, offset = [], 0
    for start, step, length in runs:
        low, high = max(begin - offset, 0), min(end - offset, length)
        if low < high:
            result.append(Run(start if start == FILL else start + low * step, step, high - low))
        offset += length
    return tuple(result)


@cache
def divided(bounds: Bounds, runs: tuple[Run, ...], out_bounds: Bounds) -> ExchangePlan:
    """Returns the plan of a result that is a list of runs (a slice, roll, pad), sharded by `out_bounds`."""
    return ExchangePlan(bounds, [part(runs, low, high) for low, high in zip(out_bounds, out_bounds[1:])])


def repartition(bounds: Bounds, out_bounds: Bounds) -> ExchangePlan:
    """Returns the plan that moves a dim from one division into shards to another.

    Raises:
        ValueError: the bounds are not those of one size.
    """
    if bounds[-1] != out_bounds[-1]:
        raise ValueError(f"shards with a total of {out_bounds[-1]} positions cannot hold a dim of {bounds[-1]}")
    return divided(bounds, (Run(0, 1, bounds[-1]),), out_bounds)


def rolled(size: int, shift: int) -> tuple[Run, ...]:
    """Returns the plan of `torch.roll` by `shift`."""
    first = -shift % size if size else 0
    return tuple(run for run in (Run(first, 1, size - first), Run(0, 1, first)) if run.length)


def flipped(size: int) -> tuple[Run, ...]:
    """Returns the plan of `torch.flip`."""
    return (Run(size - 1, -1, size),) if size else ()


def bounds_of(sizes: Iterable[int]) -> Bounds:
    """Returns the bounds `(0, .., n)` of shards of these sizes."""
    return tuple(accumulate(sizes, initial=0))

"""The exchange of a plan where all ranks run one program (XLA), for shards of one size.

Results of all ranks are cut at the same offsets. Of each segment a rank may have another source: its own shard, that of
the rank so many ranks further around the group, or the fill value. The program computes every source that some rank
has, with all ranks sending around the group, and each rank selects its own. A rank at an end gets what nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import torch

from ... import comm
from ...comm import CommError, Communicator
from ...comm.rank_selection import own_slot
from .intervals import FILL, ExchangePlan, Piece
from .shard_pieces import add, of_owner

__all__ = ["gathered", "returned"]


class Source(NamedTuple):
    """A piece of a segment, and the ranks whose results have it.

    Attributes:
        distance: of the owner, in ranks further around the group.
        piece: in the owner's shard; its owner is FILL for the fill value.
        ranks: ranks with this source.
    """

    distance: int
    piece: Piece
    ranks: frozenset[int]


@cache
def _segments(plan: ExchangePlan) -> tuple[tuple[Source, ...], ...]:
    """Returns the sources of each segment.

    Raises:
        CommError: shards, or results, of different sizes.
    """
    size = len(plan.pieces)
    ranks = [plan.of(rank) for rank in range(size)]
    for what, sizes in (
        ("shards", [rank_plan.size for rank_plan in ranks]),
        ("results", [rank_plan.length for rank_plan in ranks]),
    ):
        if len(set(sizes)) > 1:
            raise CommError(
                f"exchange: {what} have sizes {sizes}, but on XLA all ranks run one program, so sizes must be "
                "equal: redistribute() the tensor to equal shards, of a size that strides divide"
            )
    offsets = sorted({piece.offset for rank_plan in ranks for piece in rank_plan.pieces} | {ranks[0].length})
    segments = []
    for begin, end in pairwise(offsets):
        sources: dict[tuple[int, Piece], set[int]] = {}
        for rank, rank_plan in enumerate(ranks):
            piece = next(
                candidate
                for candidate in rank_plan.pieces
                if candidate.offset <= begin < candidate.offset + candidate.length
            )
            start = piece.start + (begin - piece.offset) * piece.step
            distance = 0 if piece.owner == FILL else (piece.owner - rank) % size
            part = Piece(min(piece.owner, 0), start, piece.step, end - begin, begin)
            sources.setdefault((distance, part), set()).add(rank)
        segments.append(tuple(Source(*key, frozenset(those)) for key, those in sources.items()))
    return tuple(segments)


def gathered(x: torch.Tensor, plan: ExchangePlan, communicator: Communicator, dim: int, fill: float) -> torch.Tensor:
    """Returns the positions that this rank needs."""
    segments = _segments(plan)
    far = [source for sources in segments for source in sources if source.distance]
    received = iter(_around(x, [(source, of_owner(x, source.piece, dim)) for source in far], communicator, 1))
    parts = []
    for sources in segments:
        values = []
        for source in sources:
            shape = [*x.shape[:dim], source.piece.length, *x.shape[dim + 1 :]]
            if source.piece.owner == FILL:
                values.append(x.new_full(shape, fill))
            else:
                rows = next(received) if source.distance else of_owner(x, source.piece, dim)
                values.append(rows if source.piece.step else rows.expand(shape))
        result = values[0]
        for source, value in zip(sources[1:], values[1:]):
            result = torch.where(_has(source, x, communicator), value, result)
        parts.append(result)
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def returned(grad: torch.Tensor, plan: ExchangePlan, communicator: Communicator, dim: int) -> torch.Tensor:
    """Returns the gradient of this rank's shard, from the gradients of all results."""
    near: list[tuple[Source, torch.Tensor]] = []
    far: list[tuple[Source, torch.Tensor]] = []
    for sources in _segments(plan):
        for source in sources:
            if source.piece.owner == FILL:
                continue
            rows = grad.narrow(dim, source.piece.offset, source.piece.length)
            if len(sources) > 1:
                rows = torch.where(_has(source, grad, communicator), rows, torch.zeros_like(rows))
            rows = rows if source.piece.step else rows.sum(dim, keepdim=True)
            (far if source.distance else near).append((source, rows))
    result = grad.new_zeros([*grad.shape[:dim], plan.of(0).size, *grad.shape[dim + 1 :]])
    came = _around(grad, far, communicator, -1)
    for source, rows in (*near, *((source, rows) for (source, _), rows in zip(far, came))):
        add(result, source.piece, rows, dim)
    return result


def _has(source: Source, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Returns whether this rank has a source; `[]`, bool."""
    table = torch.tensor([rank in source.ranks for rank in range(communicator.size)], device=x.device)
    return own_slot(table, communicator, 0)


def _around(
    x: torch.Tensor, parts: Sequence[tuple[Source, torch.Tensor]], communicator: Communicator, sign: int
) -> list[torch.Tensor]:
    """Returns each part of the rank at its distance around the group. `sign`: 1: further, -1: back."""
    size, rank = communicator.size, int(communicator.rank)
    if not parts:
        return []
    distances = sorted({source.distance for source, _ in parts})
    sends, received = ([x.new_empty(0)] * size for _ in range(2))
    for distance in distances:
        flat = torch.cat([rows.reshape(-1) for source, rows in parts if source.distance == distance])
        sends[(rank - sign * distance) % size] = flat
        received[(rank + sign * distance) % size] = torch.empty_like(flat)
    comm.exchange(sends, received, communicator)
    whole = {distance: received[(rank + sign * distance) % size] for distance in distances}
    result = []
    for source, rows in parts:
        received_rows, whole[source.distance] = whole[source.distance].tensor_split([rows.numel()])
        result.append(received_rows.view(rows.shape))
    return result

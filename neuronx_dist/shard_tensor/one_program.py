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

from .. import comm
from ..comm import CommError, Communicator
from ..comm.select import own_slot
from .intervals import FILL, Piece, Plan
from .pieces import add, of_owner

__all__ = ["gathered", "returned"]


class Source(NamedTuple):
    """What some ranks have in a segment.

    Attributes:
        distance: of the owner, in ranks further around the group.
        piece: in the owner's shard; its owner is FILL for the fill value.
        ranks: those that have it.
    """

    distance: int
    piece: Piece
    ranks: frozenset[int]


@cache
def _segments(plan: Plan) -> tuple[tuple[Source, ...], ...]:
    """The sources of each segment.

    Raises:
        CommError: shards, or results, of different sizes.
    """
    size = len(plan.pieces)
    ranks = [plan.of(rank) for rank in range(size)]
    for what, sizes in (("shards", [own.size for own in ranks]), ("what ranks need", [own.length for own in ranks])):
        if len(set(sizes)) > 1:
            raise CommError(
                f"exchange: {what} of sizes {sizes}: on XLA all ranks run one program, so that they have to be equal: "
                "redistribute() the tensor to shards of one size, which strides divide"
            )
    offsets = sorted({piece.offset for own in ranks for piece in own.pieces} | {ranks[0].length})
    segments = []
    for begin, end in pairwise(offsets):
        sources: dict[tuple[int, Piece], set[int]] = {}
        for rank, own in enumerate(ranks):
            piece = next(each for each in own.pieces if each.offset <= begin < each.offset + each.length)
            start = piece.start + (begin - piece.offset) * piece.step
            distance = 0 if piece.owner == FILL else (piece.owner - rank) % size
            part = Piece(min(piece.owner, 0), start, piece.step, end - begin, begin)
            sources.setdefault((distance, part), set()).add(rank)
        segments.append(tuple(Source(*key, frozenset(those)) for key, those in sources.items()))
    return tuple(segments)


def gathered(x: torch.Tensor, plan: Plan, communicator: Communicator, dim: int, fill: float) -> torch.Tensor:
    """What this rank needs."""
    segments = _segments(plan)
    far = [each for sources in segments for each in sources if each.distance]
    received = iter(_around(x, [(each, of_owner(x, each.piece, dim)) for each in far], communicator, 1))
    parts = []
    for sources in segments:
        values = []
        for each in sources:
            shape = [*x.shape[:dim], each.piece.length, *x.shape[dim + 1 :]]
            if each.piece.owner == FILL:
                values.append(x.new_full(shape, fill))
            else:
                rows = next(received) if each.distance else of_owner(x, each.piece, dim)
                values.append(rows if each.piece.step else rows.expand(shape))
        result = values[0]
        for each, value in zip(sources[1:], values[1:]):
            result = torch.where(_has(each, x, communicator), value, result)
        parts.append(result)
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)


def returned(grad: torch.Tensor, plan: Plan, communicator: Communicator, dim: int) -> torch.Tensor:
    """The gradient of this rank's shard, from those of all results."""
    near: list[tuple[Source, torch.Tensor]] = []
    far: list[tuple[Source, torch.Tensor]] = []
    for sources in _segments(plan):
        for each in sources:
            if each.piece.owner == FILL:
                continue
            rows = grad.narrow(dim, each.piece.offset, each.piece.length)
            if len(sources) > 1:
                rows = torch.where(_has(each, grad, communicator), rows, torch.zeros_like(rows))
            rows = rows if each.piece.step else rows.sum(dim, keepdim=True)
            (far if each.distance else near).append((each, rows))
    result = grad.new_zeros([*grad.shape[:dim], plan.of(0).size, *grad.shape[dim + 1 :]])
    came = _around(grad, far, communicator, -1)
    for each, rows in (*near, *((each, rows) for (each, _), rows in zip(far, came))):
        add(result, each.piece, rows, dim)
    return result


def _has(source: Source, x: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Whether this rank has a source; `[]`, bool."""
    table = torch.tensor([rank in source.ranks for rank in range(communicator.size)], device=x.device)
    return own_slot(table, communicator, 0)


def _around(
    x: torch.Tensor, parts: Sequence[tuple[Source, torch.Tensor]], communicator: Communicator, sign: int
) -> list[torch.Tensor]:
    """Each part, as the rank so far around the group has it. `sign`: 1: further, -1: back."""
    size, rank = communicator.size, int(communicator.rank)
    if not parts:
        return []
    distances = sorted({each.distance for each, _ in parts})
    sends, received = ([x.new_empty(0)] * size for _ in range(2))
    for distance in distances:
        flat = torch.cat([rows.reshape(-1) for each, rows in parts if each.distance == distance])
        sends[(rank - sign * distance) % size] = flat
        received[(rank + sign * distance) % size] = torch.empty_like(flat)
    comm.exchange(sends, received, communicator)
    whole = {distance: received[(rank + sign * distance) % size] for distance in distances}
    result = []
    for each, rows in parts:
        own, whole[each.distance] = whole[each.distance].tensor_split([rows.numel()])
        result.append(own.view(rows.shape))
    return result

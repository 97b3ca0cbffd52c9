"""Rows of a table of which each rank has a shard, and the positions of ids in that shard."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import comm, spmd
from ..comm.context import AxisLike
from ..comm.ranks.rank_numbers import concrete
from ..spmd import P, V

__all__ = ["embedding", "local_positions"]


def local_positions(
    ids: torch.Tensor, size: int, axis: AxisLike, first: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns positions of ids in this rank's shard, 0 for ids elsewhere, and the mask of ids elsewhere: V.

    Args:
        size: of this rank's shard.
        first: the id at which it begins; None: shards have equal sizes.
    """
    start = comm.communicator(axis).coordinate(ids) * size if first is None else first
    local = spmd.trust(ids - start, axis, V)
    elsewhere = (local < 0) | (local >= size)
    return local.masked_fill(elsewhere, 0), elsewhere


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    *,
    axis: AxisLike,
    sparse: bool = False,
) -> torch.Tensor:
    """Returns the rows of the ids that this rank holds, zeros for other ids: P.

    Args:
        input: R, ids in the whole table.
        weight: S(0), `[rows/n, width]`.
        padding_idx: from 0; this row gets no gradient.
    """
    count = weight.shape[0]
    local, elsewhere = local_positions(input, count, axis)
    padding, rank = None, comm.communicator(axis).coordinate(input) if padding_idx is not None else None
    if padding_idx is not None and isinstance(rank, int):
        padding = padding_idx - concrete(rank) * count
        padding = padding if 0 <= padding < count else None
    rows = F.embedding(local, weight, padding, sparse=sparse)
    if padding_idx is not None and not isinstance(rank, int):  # which rank has the row is no constant here
        rows = torch.where((input == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return spmd.trust(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0), axis, P)

"""Rows of a sharded dim by position: each rank requests the rows it needs from their owners, and receives them.

Which rows are needed is data: the numbers of questions are gathered first (one number for two ranks), then questions go
to the owners, and rows come back. The backward pass sends gradients to the owners, where they are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ... import comm
from ...comm import Communicator
from ...spmd import no_typecheck
from ...torch_internals.fake_tensors import FakeTensor
from ..typed import exchanged
from .intervals import bounds_of

__all__ = ["ask", "fetch", "has_values", "position_type"]


class Questions(NamedTuple):
    """The rows that each rank requests from each other rank.

    Attributes:
        order: of this rank's positions, sorted by their owners.
        counts: of them, for each owner.
        asked: positions in this rank's shard that each rank asks for.
    """

    communicator: Communicator
    order: torch.Tensor
    counts: list[int]
    asked: list[torch.Tensor]


def has_values(x: torch.Tensor) -> bool:
    """Returns whether `x` has values: it is neither a meta nor a fake tensor."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def position_type(size: int) -> torch.dtype:
    """Integer dtype for positions in a dim of `size`."""
    return torch.int32 if size <= torch.iinfo(torch.int32).max else torch.int64


@no_typecheck()  # of positions, and no values
def ask(index: torch.Tensor, sizes: Sequence[int], communicator: Communicator) -> Questions:
    """Requests the positions `index`, [n], each >= 0, of a dim sharded in `sizes` from their owners.

    Raises:
        IndexError: a rank asks for a position that there is not; on all ranks.
    """
    count = communicator.size
    bounds = bounds_of(sizes)
    starts = index.new_tensor(bounds[:-1])
    wrong = ((index < 0) | (index >= bounds[-1])).sum()
    owner = torch.bucketize(index.clamp(0, max(bounds[-1] - 1, 0)), index.new_tensor(bounds[1:-1]), right=True)
    counted = torch.cat([torch.bincount(owner, minlength=count), wrong.view(1)])
    table = comm.all_gather(counted.view(1, -1), communicator, dim=0).tolist()
    if any(row[-1] for row in table):
        bad = {rank: row[-1] for rank, row in enumerate(table) if row[-1]}
        raise IndexError(
            f"indices are out of range for a dim of {bounds[-1]} elements; number of such indices by rank: {bad}"
        )
    order = torch.argsort(owner, stable=True)
    counts = table[communicator.rank][:count]
    questions = list((index - starts[owner])[order].to(position_type(max(sizes))).split(counts))
    asked = [questions[0].new_empty(row[communicator.rank]) for row in table]
    comm.exchange(questions, asked, communicator)
    return Questions(communicator, order, counts, asked)


def fetch(x: torch.Tensor, questions: Questions) -> torch.Tensor:
    """Returns the rows that this rank requested, [n, ..], of shards [rows, ..]. Differentiable."""

    def run() -> torch.Tensor:
        result: torch.Tensor = _Fetch.apply(x, questions, None)
        return result

    return exchanged(run, x, questions.communicator, 0)


class _Fetch(torch.autograd.Function):
    """Autograd function of `fetch`. With `rows` it is the way back: owners add the gradients, in `rows` rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, questions: Questions, rows: int | None) -> torch.Tensor:
        ctx.questions, ctx.rows = questions, x.shape[0] if rows is None else None
        communicator, order, counts, asked = questions
        if rows is None:
            sends = [x.index_select(0, positions) for positions in asked]
            received = [x.new_empty((size, *x.shape[1:])) for size in counts]
        else:
            sends = list(x.index_select(0, order).split(counts))
            received = [x.new_empty((positions.numel(), *x.shape[1:])) for positions in asked]
        comm.exchange(sends, received, communicator)
        if rows is None:
            result = x.new_empty((order.numel(), *x.shape[1:]))
            return result.index_copy_(0, order, torch.cat(received))
        result = x.new_zeros((rows, *x.shape[1:]))
        return result.index_add_(0, torch.cat(asked), torch.cat(received))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Fetch.apply(grad, ctx.questions, ctx.rows), None, None

"""The exchange of a plan: one differentiable function that gives each rank what it needs of a sharded dim.

Gradients go back to the owners and are added there. Every rank of the group takes part in both passes, with an empty
shard or an empty result too; where no rank needs anything from another one, nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import comm
from ..comm import Communicator
from ..comm.context import AxisLike
from ..comm.select import in_one_program
from ..spmd import no_typecheck
from . import one_program
from .intervals import FILL, Piece, Plan, RankPlan
from .pieces import add, of_owner
from .report import predict, watched
from .typed import exchanged

__all__ = ["Started", "exchange", "linked", "planned_bytes", "start", "take"]


def exchange(
    x: torch.Tensor,
    plan: Plan,
    axis: AxisLike,
    dim: int,
    fill: float | int | bool = 0,
    started: Started | None = None,
) -> torch.Tensor:
    """What this rank needs of a dim that is sharded over `axis`: `[.., own, ..] -> [.., needed, ..]`. Differentiable.

    Args:
        fill: what stands where the plan has no source.
        started: an exchange of the same `x` and plan, begun by `start`.

    Raises:
        ValueError: `x` has not the size that the plan has for this rank.
    """
    communicator = comm.communicator(axis)
    own = plan.of(int(communicator.rank))
    dim = _checked(x, plan, own, communicator, dim)
    if plan.is_local and (plan.is_identity if in_one_program(x) else own.is_identity):
        return x
    return exchanged(lambda: _Exchange.apply(x, plan, communicator, dim, fill, False, started), x, communicator, dim)


def take(x: torch.Tensor, plan: Plan, dim: int, fill: float | int | bool = 0) -> torch.Tensor:
    """The same for a plan of one rank, without a group."""
    if plan.of(0).is_identity:
        return x
    result: torch.Tensor = _Exchange.apply(x, plan, None, dim % x.dim(), fill, False, None)
    return result


def planned_bytes(x: torch.Tensor, plan: Plan, rank: int, dim: int) -> int:
    """Bytes that an exchange of a shard like `x` is recorded with on the rank with group index `rank`, either way."""
    shape = list(x.shape)
    shape[dim] = 1
    return plan.rows(rank) * torch.Size(shape).numel() * x.dtype.itemsize


def linked(result: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """`result`, which in autograd's graph is made of `others` too: they get gradients, of 0.

    A rank that computes nothing takes part in the reduction of their gradients by it.
    """
    for other in others:
        if other is not None and other.requires_grad:
            result = result + other.reshape(-1)[:0].sum().to(result.dtype)
    return result


class Started:
    """Messages under way; what is owned can be used meanwhile."""

    def __init__(self, received: Sequence[torch.Tensor], handle: Any) -> None:
        self._received = received
        self._handle = handle

    def wait(self) -> Sequence[torch.Tensor]:
        """For each rank what has come from it; `[.., rows, ..]`."""
        if self._handle is not None:
            self._handle.wait()
        return self._received


def start(x: torch.Tensor, plan: Plan, axis: AxisLike, dim: int) -> Started:
    """Sends what others need of `x`. It is awaited by `exchange(.., started=)`, which every rank has to call."""
    communicator = comm.communicator(axis)
    own = plan.of(int(communicator.rank))
    dim = _checked(x, plan, own, communicator, dim)
    with no_typecheck():  # it is judged where it is awaited
        return _start(x.detach(), plan, own, communicator, dim)


def _start(x: torch.Tensor, plan: Plan, own: RankPlan, communicator: Communicator | None, dim: int) -> Started:
    parts = [[of_owner(x, piece, dim) for piece in pieces] for pieces in own.sends]
    return _communicate(x, parts, own.received, plan, communicator, dim)


def _communicate(
    x: torch.Tensor,
    parts: Sequence[Sequence[torch.Tensor]],
    rows: Sequence[int],
    plan: Plan,
    communicator: Communicator | None,
    dim: int,
) -> Started:
    """Sends each rank its parts, one after the other along `dim`, and gets `rows[i]` positions from rank i."""
    if plan.is_local or communicator is None:
        return Started((), None)
    if watched():
        predict(planned_bytes(x, plan, int(communicator.rank), dim))
    shape = list(x.shape)

    def empty(count: int) -> torch.Tensor:
        shape[dim] = count
        return x.new_empty(shape)

    nothing = empty(0)
    sends = [torch.cat(list(own), dim) if len(own) > 1 else own[0] if own else nothing for own in parts]
    received = [empty(count) if count else nothing for count in rows]
    return Started(received, comm.exchange(sends, received, communicator, async_op=True))


class _Exchange(torch.autograd.Function):
    """Linear in `x`: gradients go the other way, and those of gradients this way again."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        plan: Plan,
        communicator: Communicator | None,
        dim: int,
        fill: float | int | bool,
        backward: bool,
        started: Started | None,
    ) -> torch.Tensor:
        ctx.arguments = plan, communicator, dim, backward
        rank = 0 if communicator is None else int(communicator.rank)
        own = plan.of(rank)
        if communicator is not None and in_one_program(x):
            if backward:
                return one_program.returned(x, plan, communicator, dim)
            return one_program.gathered(x, plan, communicator, dim, fill)
        if backward:
            return _return(x, plan, own, rank, communicator, dim)
        return _gather(x, plan, own, rank, communicator, dim, fill, started)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan, communicator, dim, backward = ctx.arguments
        result = _Exchange.apply(grad, plan, communicator, dim, 0, not backward, None)
        return result, None, None, None, None, None, None


def _gather(
    x: torch.Tensor,
    plan: Plan,
    own: RankPlan,
    rank: int,
    communicator: Communicator | None,
    dim: int,
    fill: float | int | bool,
    started: Started | None,
) -> torch.Tensor:
    """A rank's pieces, one after the other: its own, those of others, and fill values."""
    received = (started or _start(x, plan, own, communicator, dim)).wait()
    offsets = [0] * len(own.received)
    parts = []
    for piece in own.pieces:
        if piece.owner == FILL:
            shape = list(x.shape)
            shape[dim] = piece.length
            parts.append(x.new_full(shape, fill))
            continue
        if piece.owner == rank:
            rows = of_owner(x, piece, dim)
        else:
            rows = received[piece.owner].narrow(dim, offsets[piece.owner], piece.rows)
            offsets[piece.owner] += piece.rows
        parts.append(rows if piece.step else rows.expand([*x.shape[:dim], piece.length, *x.shape[dim + 1 :]]))
    if not parts:
        return x.narrow(dim, 0, 0).clone()
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone()


def _return(
    grad: torch.Tensor, plan: Plan, own: RankPlan, rank: int, communicator: Communicator | None, dim: int
) -> torch.Tensor:
    """The gradient of each piece at its owner, all that are of one position added."""
    parts: list[list[torch.Tensor]] = [[] for _ in own.sends]
    mine: list[tuple[Piece, torch.Tensor]] = []
    for piece in own.pieces:
        if piece.owner == FILL:
            continue
        rows = grad.narrow(dim, piece.offset, piece.length)
        rows = rows if piece.step else rows.sum(dim, keepdim=True)
        if piece.owner == rank:
            mine.append((piece, rows))
        else:
            parts[piece.owner].append(rows)
    work = _communicate(grad, parts, own.sent, plan, communicator, dim)
    if mine and mine[0][0].step == 1 and mine[0][0].length == own.size:  # all that it owns
        result = mine.pop(0)[1].clone(memory_format=torch.contiguous_format)
    else:
        result = grad.new_zeros([*grad.shape[:dim], own.size, *grad.shape[dim + 1 :]])
    for piece, rows in mine:
        add(result, piece, rows, dim)
    for pieces, rows in zip(own.sends, work.wait()):
        offset = 0
        for piece in pieces:
            add(result, piece, rows.narrow(dim, offset, piece.rows), dim)
            offset += piece.rows
    return result


def _checked(x: torch.Tensor, plan: Plan, own: RankPlan, communicator: Communicator, dim: int) -> int:
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != own.size or len(plan.pieces) != communicator.size:
        raise ValueError(
            f"exchange over {communicator.axis}: a shard of shape {tuple(x.shape)} does not fit the plan, which has "
            f"{own.size} positions along dim {dim} for index {communicator.rank} of {len(plan.pieces)} ranks"
        )
    return dim % x.dim()

"""The exchange of a plan: one differentiable function that brings each rank the positions of a sharded dim it needs.

Gradients go back to the owners and are added there. Every rank of the group takes part in both passes, with an empty
shard or an empty result too; where no rank needs anything from another one, nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from ... import comm
from ...comm import Communicator
from ...comm.context import AxisLike
from ...comm.rank_selection import in_one_program
from ...comm.verbs.transformed_tensors import transforming
from ...spmd import no_typecheck
from ...spmd.linear_operator import linear
from ..report import predict, watched
from ..typed import exchanged
from . import one_program
from .intervals import FILL, ExchangePlan, Piece, RankPlan
from .shard_pieces import add, of_owner
from .tangents import may_be_dual, moved_dual

__all__ = ["Started", "exchange", "linked", "planned_bytes", "start", "take"]


def exchange(
    x: torch.Tensor,
    plan: ExchangePlan,
    axis: AxisLike,
    dim: int,
    fill: float | int | bool = 0,
    started: Started | None = None,
) -> torch.Tensor:
    """Gets the needed positions of a dim sharded over `axis`: `[.., local, ..] -> [.., needed, ..]`. Differentiable.

    Args:
        fill: what stands where the plan has no source.
        started: an exchange of the same `x` and plan, begun by `start`.

    Raises:
        ValueError: `x` has not the size that the plan has for this rank.
    """
    communicator = comm.communicator(axis)
    rank_plan = plan.of(int(communicator.rank))
    dim = _checked(x, plan, rank_plan, communicator, dim)
    if plan.is_local and (plan.is_identity if in_one_program(x) else rank_plan.is_identity):
        return x

    def run(x: torch.Tensor, fill: float | int | bool = 0, started: Started | None = None) -> torch.Tensor:
        use = _Use(plan, communicator, dim, fill, False, started)
        return exchanged(lambda: _apply(x, use), x, communicator, dim)

    return moved_dual(x, partial(run, fill=fill, started=started), run) if may_be_dual(x) else run(x, fill, started)


def take(x: torch.Tensor, plan: ExchangePlan, dim: int, fill: float | int | bool = 0) -> torch.Tensor:
    """Takes the positions of a plan for one rank, without a group: `exchange` that communicates nothing."""
    if plan.of(0).is_identity:
        return x
    return _apply(x, _Use(plan, None, dim % x.dim(), fill, False, None))


def planned_bytes(x: torch.Tensor, plan: ExchangePlan, rank: int, dim: int) -> int:
    """Bytes that `comm.record` notes for an exchange of a shard like `x` on the rank with group index `rank`."""
    shape = list(x.shape)
    shape[dim] = 1
    return plan.rows(rank) * torch.Size(shape).numel() * x.dtype.itemsize


def linked(result: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
    """Returns `result` with `others` in its autograd graph: they get gradients of 0, it a tangent of 0.

    A rank that computes nothing takes part in the reduction of their gradients, or of its tangent, by it.
    """
    for other in others:
        if other is None:
            continue
        if other.requires_grad or (transforming() and (other.is_floating_point() or other.is_complex())):
            zero = other.reshape(-1)[:0].sum()
            result = result + (zero if result.is_complex() else zero.real).to(result.dtype)
    return result


class Started:
    """Messages under way; the rank can compute on its shard meanwhile."""

    def __init__(self, received: Sequence[torch.Tensor], handle: Any) -> None:
        self._received = received
        self._handle = handle

    def wait(self) -> Sequence[torch.Tensor]:
        """Returns the tensor received from each rank; `[.., rows, ..]`."""
        if self._handle is not None:
            self._handle.wait()
        return self._received


def start(x: torch.Tensor, plan: ExchangePlan, axis: AxisLike, dim: int) -> Started:
    """Starts to send parts of `x` to ranks that need them. Every rank must call `exchange(.., started=)` to wait."""
    communicator = comm.communicator(axis)
    rank_plan = plan.of(int(communicator.rank))
    dim = _checked(x, plan, rank_plan, communicator, dim)
    with no_typecheck():  # it is judged where it is awaited
        x = forward_ad.unpack_dual(x).primal if may_be_dual(x) else x
        return _start(x.detach(), plan, rank_plan, communicator, dim)


def _start(
    x: torch.Tensor, plan: ExchangePlan, rank_plan: RankPlan, communicator: Communicator | None, dim: int
) -> Started:
    parts = [[of_owner(x, piece, dim) for piece in pieces] for pieces in rank_plan.sends]
    return _communicate(x, parts, rank_plan.received, plan, communicator, dim)


def _communicate(
    x: torch.Tensor,
    parts: Sequence[Sequence[torch.Tensor]],
    rows: Sequence[int],
    plan: ExchangePlan,
    communicator: Communicator | None,
    dim: int,
) -> Started:
    """Sends each rank its parts, in order along `dim`, and receives `rows[i]` positions from rank i."""
    if plan.is_local or communicator is None:
        return Started((), None)
    if watched():
        predict(planned_bytes(x, plan, int(communicator.rank), dim))
    shape = list(x.shape)

    def empty(count: int) -> torch.Tensor:
        shape[dim] = count
        return x.new_empty(shape)

    nothing = empty(0)
    sends = [torch.cat(list(pieces), dim) if len(pieces) > 1 else pieces[0] if pieces else nothing for pieces in parts]
    received = [empty(count) if count else nothing for count in rows]
    return Started(received, comm.exchange(sends, received, communicator, async_op=True))


class _Use(NamedTuple):
    """One use of a plan. Without its fill values it is a linear operator."""

    plan: ExchangePlan
    communicator: Communicator | None
    dim: int
    fill: float | int | bool
    backward: bool
    started: Started | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the operator to a tangent, whose fill values are 0."""
        return _apply(x, self._replace(fill=0, started=None))

    def value(self, x: torch.Tensor) -> torch.Tensor:
        plan, communicator, dim, fill, backward, started = self
        rank = 0 if communicator is None else int(communicator.rank)
        rank_plan = plan.of(rank)
        if communicator is not None and in_one_program(x):
            if backward:
                return one_program.returned(x, plan, communicator, dim)
            return one_program.gathered(x, plan, communicator, dim, fill)
        if backward:
            return _return(x, plan, rank_plan, rank, communicator, dim)
        return _gather(x, plan, rank_plan, rank, communicator, dim, fill, started)

    def transposed(self) -> _Use:
        return self._replace(fill=0, backward=not self.backward, started=None)

    def batched(self) -> _Use:
        return self._replace(dim=self.dim + 1)


class _Exchange(torch.autograd.Function):
    """Autograd function of an exchange. Gradients go from receivers to owners; second gradients go forward again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, use: _Use) -> torch.Tensor:
        ctx.use = use
        return use.value(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _apply(grad, ctx.use.transposed()), None


def _apply(x: torch.Tensor, use: _Use) -> torch.Tensor:
    result: torch.Tensor = linear(use, x) if transforming() else _Exchange.apply(x, use)
    return result


def _gather(
    x: torch.Tensor,
    plan: ExchangePlan,
    rank_plan: RankPlan,
    rank: int,
    communicator: Communicator | None,
    dim: int,
    fill: float | int | bool,
    started: Started | None,
) -> torch.Tensor:
    """Joins a rank's pieces in order: local ones, received ones, and fill values."""
    received = (started or _start(x, plan, rank_plan, communicator, dim)).wait()
    offsets = [0] * len(rank_plan.received)
    parts = []
    for piece in rank_plan.pieces:
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
    grad: torch.Tensor, plan: ExchangePlan, rank_plan: RankPlan, rank: int, communicator: Communicator | None, dim: int
) -> torch.Tensor:
    """Adds the gradients of all pieces at their owners, position by position."""
    parts: list[list[torch.Tensor]] = [[] for _ in rank_plan.sends]
    mine: list[tuple[Piece, torch.Tensor]] = []
    for piece in rank_plan.pieces:
        if piece.owner == FILL:
            continue
        rows = grad.narrow(dim, piece.offset, piece.length)
        rows = rows if piece.step else rows.sum(dim, keepdim=True)
        if piece.owner == rank:
            mine.append((piece, rows))
        else:
            parts[piece.owner].append(rows)
    work = _communicate(grad, parts, rank_plan.sent, plan, communicator, dim)
    if mine and mine[0][0].step == 1 and mine[0][0].length == rank_plan.size:  # all that it owns
        result = mine.pop(0)[1].clone(memory_format=torch.contiguous_format)
    else:
        result = grad.new_zeros([*grad.shape[:dim], rank_plan.size, *grad.shape[dim + 1 :]])
    for piece, rows in mine:
        add(result, piece, rows, dim)
    for pieces, rows in zip(rank_plan.sends, work.wait()):
        offset = 0
        for piece in pieces:
            add(result, piece, rows.narrow(dim, offset, piece.rows), dim)
            offset += piece.rows
    return result


def _checked(x: torch.Tensor, plan: ExchangePlan, rank_plan: RankPlan, communicator: Communicator, dim: int) -> int:
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != rank_plan.size or len(plan.pieces) != communicator.size:
        raise ValueError(
            f"exchange over {communicator.axis}: a shard of shape {tuple(x.shape)} does not match the plan, which "
            f"has {rank_plan.size} positions along dim {dim} for index {communicator.rank} of {len(plan.pieces)} "
            "ranks"
        )
    return dim % x.dim()

"""From one layout to another: the moves between two placements on each mesh dim, one mesh dim after the other.

`steps(spec, target)` are functions of the local tensor, computed once for two specs; they call the operations of
`moves.py`. `used` says that each rank uses the result on its own (type R in place of I): its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.overrides import has_torch_function_unary, has_torch_function_variadic

from .. import comm, spmd
from ..comm import Communicator
from ..comm.transforms import transforming
from ..spmd import I, P, R
from ..spmd.rows import ROWS
from ..spmd.watching import active
from . import moves
from .device_mesh import DeviceMesh
from .extremes import extreme
from .other_mesh import moved_to_mesh
from .placements import Partial, Placement, Replicate, Shard
from .spec import ShardTensorSpec, gradient_spec
from .typed import laid_out

__all__ = ["Step", "nothing_of", "redistributed", "run", "steps", "used_by", "used_together"]

Step = Callable[[torch.Tensor], torch.Tensor]

_REPLICATE = Replicate()


def redistributed(local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """This rank's part of a tensor in another layout.

    Raises:
        ValueError: the target is a layout of another shape.
    """
    if spec is target:
        return local
    result = run(local, steps(spec, target))
    if active() is not None:
        laid_out(result, target)
    return result


def run(local: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    for step in steps:
        local = step(local)
    return local


def steps(spec: ShardTensorSpec, target: ShardTensorSpec, used: Sequence[int] = ()) -> tuple[Step, ...]:
    """What makes a local tensor of `spec` one of `target`; nothing where both are equal.

    Args:
        used: mesh dims along which a Replicate of the target is R: each rank uses it on its own.
    """
    if spec.shape != target.shape:
        raise ValueError(
            f"redistribute: a tensor of shape {tuple(spec.shape)} cannot have a layout of {tuple(target.shape)}"
        )
    if spec.mesh is not target.mesh:
        return _to_another_mesh(spec, target, used)
    if spec.mesh.communicators is None:
        return (partial(nothing_of, shape=target.local_shape),)
    table = spec.mesh.tables.setdefault("steps", {})
    key = (spec, target, tuple(used))
    if key not in table:
        table[key] = _steps(spec, target, used)
    result: tuple[Step, ...] = table[key]
    return result


def _steps(spec: ShardTensorSpec, target: ShardTensorSpec, used: Sequence[int]) -> tuple[Step, ...]:
    result: list[Step] = []
    placements, sizes = list(spec.placements), list(spec.sizes)
    todo = list(range(spec.mesh.ndim))
    while todo:
        # A shard moves to a dim only when no other mesh dim shards it; where all wait for one another, one is gathered.
        free = next((m for m in todo if not _blocked(placements, target.placements[m], m)), None)
        if free is None:
            m = todo[0]
            result += _along(spec.mesh, m, placements[m], sizes[m], _REPLICATE, None, False)
            placements[m], sizes[m] = _REPLICATE, None
            continue
        todo.remove(free)
        m = free
        result += _along(spec.mesh, m, placements[m], sizes[m], target.placements[m], target.sizes[m], m in used)
        placements[m], sizes[m] = target.placements[m], target.sizes[m]
    return tuple(result)


def nothing_of(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The empty part that a rank outside of the mesh has, in the graph of `x`."""
    return x if x.shape == shape else x.reshape(-1)[:0].view(shape)


def _used(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """I as R. Nothing, unless a gradient is to be reduced or a mode looks."""
    if (x.requires_grad and torch.is_grad_enabled()) or has_torch_function_unary(x):
        return spmd.convert(x, group, src=I, dst=R)
    return x


_CONVERT = ROWS["convert", "I", "R"]  # by which a report names the node


class _Together(torch.autograd.Function):
    """Several tensors, I as R: their gradients are summed by one all-reduce."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, group: Communicator, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.group, ctx.row = group, _CONVERT  # type: ignore[attr-defined]
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group: Communicator = ctx.group  # type: ignore[attr-defined]
        if torch.is_grad_enabled():  # these have a graph in their turn
            return None, *(spmd.all_reduce(grad, group, src=P, dst=I) for grad in grads)
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        pieces = comm.all_reduce(flat, group, out=flat).split([grad.numel() for grad in grads])
        return None, *(piece.view(grad.shape) for piece, grad in zip(pieces, grads))


_use_together: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Together).apply


def used_by(step: Step) -> Communicator | None:
    """The group over which a step makes I to R, if it is one that does."""
    group: Communicator | None = step.keywords["group"] if isinstance(step, partial) and step.func is _used else None
    return group


def used_together(xs: Sequence[torch.Tensor], group: Communicator) -> Sequence[torch.Tensor]:
    """I as R, of several tensors that are used by one operation."""
    if not torch.is_grad_enabled() and not has_torch_function_variadic(*xs):
        return xs
    first = xs[0]
    if (
        group.size > 1
        and torch.is_grad_enabled()
        and all(x.requires_grad and x.dtype is first.dtype and x.device == first.device for x in xs)
        and not (has_torch_function_variadic(*xs) or transforming())
    ):
        return _use_together(group, *xs)
    return [_used(x, group) for x in xs]


def _summed(x: torch.Tensor, group: Communicator, used: bool) -> torch.Tensor:
    return spmd.all_reduce(x, group, src=P, dst=R if used else I)


def _as_summand(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    return spmd.convert(x, group, src=I, dst=P, expert_mode=True)


def _blocked(placements: Sequence[Placement], wanted: Placement, mesh_dim: int) -> bool:
    return isinstance(wanted, Shard) and any(
        isinstance(other, Shard) and other.dim == wanted.dim for m, other in enumerate(placements) if m != mesh_dim
    )


def _along(
    mesh: DeviceMesh,
    mesh_dim: int,
    src: Placement,
    src_sizes: tuple[int, ...] | None,
    dst: Placement,
    dst_sizes: tuple[int, ...] | None,
    used: bool,
) -> list[Step]:
    """The steps along one mesh dim."""
    group = mesh.communicator(mesh_dim)
    if isinstance(src, Shard) and isinstance(dst, Shard):
        assert src_sizes is not None and dst_sizes is not None
        if src.dim == dst.dim and src_sizes == dst_sizes:
            return []
        return [
            partial(
                moves.transpose,
                communicator=group,
                src_dim=src.dim,
                src_sizes=src_sizes,
                dst_dim=dst.dim,
                dst_sizes=dst_sizes,
            )
        ]
    if isinstance(src, Shard):
        assert src_sizes is not None
        if isinstance(dst, Replicate):
            return [partial(moves.gather, communicator=group, dim=src.dim, sizes=src_sizes, used=used)]
        gathered = _along(mesh, mesh_dim, src, src_sizes, _REPLICATE, None, False)
        return gathered + _along(mesh, mesh_dim, _REPLICATE, None, dst, None, False)
    if isinstance(src, Replicate):
        if isinstance(dst, Replicate):
            return [partial(_used, group=group)] if used else []
        if isinstance(dst, Shard):
            assert dst_sizes is not None
            return [partial(moves.split, communicator=group, dim=dst.dim, sizes=dst_sizes)]
        return [partial(_as_summand, group=group)] if _op(dst) == "sum" else []  # it is its own mean, or maximum
    if isinstance(dst, Partial):
        if _op(src) == _op(dst):
            return []
        if {_op(src), _op(dst)} == {"sum", "avg"}:
            return [partial(_scaled, group=group, divide=_op(src) == "avg")]
        raise ValueError(f"redistribute: {src!r} cannot become {dst!r}; make it Replicate() first")
    if _op(src) == "max":
        reduced: list[Step] = [partial(extreme, dims=(), groups=(group,), op="max")]
        return reduced + _along(mesh, mesh_dim, _REPLICATE, None, dst, dst_sizes, used)
    if _op(src) == "avg":
        summed = _along(mesh, mesh_dim, Partial(), None, dst, dst_sizes, used)
        return [partial(_scaled, group=group, divide=True), *summed]
    if isinstance(dst, Replicate):
        return [partial(_summed, group=group, used=used)]
    assert isinstance(dst, Shard) and dst_sizes is not None
    return [partial(moves.scatter_sum, communicator=group, dim=dst.dim, sizes=dst_sizes)]


def _op(placement: Placement) -> str:
    assert isinstance(placement, Partial)
    return str(placement.reduce_op)


def _scaled(x: torch.Tensor, group: Communicator, divide: bool) -> torch.Tensor:
    """Summands of a mean over the ranks as those of a sum, or the other way."""
    return x * (1 / comm.size(group)) if divide else x * comm.size(group)


def _to_another_mesh(spec: ShardTensorSpec, target: ShardTensorSpec, used: Sequence[int]) -> tuple[Step, ...]:
    """By one exchange; only a maximum is taken before, on the mesh that has it."""
    if used:
        raise ValueError(f"an operand on {spec.mesh} cannot be used on {target.mesh}: redistribute() it first")
    operations = {_op(spec.placements[m]) for m in spec.partial} | {_op(target.placements[m]) for m in target.partial}
    source = spec if operations <= {"sum"} else gradient_spec(spec)
    if any(_op(target.placements[m]) != "sum" for m in target.partial):
        raise ValueError(f"redistribute: {list(target.placements)} on another mesh: only a sum is spread over ranks")
    return (*steps(spec, source), partial(moved_to_mesh, spec=source, target=target))

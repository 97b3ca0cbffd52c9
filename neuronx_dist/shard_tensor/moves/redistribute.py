"""From one layout to another: the moves between two placements on each mesh dim, one mesh dim after the other.

`steps(spec, target)` are functions of the local tensor, computed once for two specs; they call the operations of
`one_dim.py`. `used` says that each rank uses the result on its own (type R in place of I): its gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakKeyDictionary, ref

import torch
from torch.overrides import has_torch_function_unary, has_torch_function_variadic

from ... import comm, spmd
from ...comm import Communicator
from ...comm.verbs.transformed_tensors import transforming
from ...spmd import I, P, R
from ...spmd.rows import ROWS
from ...spmd.watching import active
from ...torch_internals.autograd import apply_without_transforms
from ..bounded import Bounded
from ..device_mesh import DeviceMesh
from ..placements import Partial, Placement, Replicate, Shard
from ..spec import ShardTensorSpec, gradient_spec, on_merged
from ..typed import laid_out
from . import one_dim as moves
from .exchange import linked
from .extremes import extreme
from .other_mesh import moved_to_mesh

__all__ = [
    "Step",
    "check_is_no_copy",
    "mark_as_copy",
    "moved",
    "nothing_of",
    "other_mesh",
    "redistributed",
    "redistributed_view",
    "run",
    "steps",
    "used_by",
    "used_together",
]

Step = Callable[[torch.Tensor], torch.Tensor]

_REPLICATE = Replicate()


def redistributed(local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """Moves a tensor to another layout on its mesh, and returns this rank's part.

    Raises:
        ValueError: the target is a layout of another shape, or on another mesh: only `ShardTensor.redistribute` moves a
            tensor there.
    """
    if spec is target:
        return local
    if spec.mesh is not target.mesh:
        raise other_mesh(spec.mesh, target.mesh)
    return moved(local, spec, target)


def moved(local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """Moves a tensor to another layout, which may be on another mesh, and returns this rank's part."""
    result = run(local, steps(spec, target))
    if active() is not None:
        laid_out(result, target)
    return result


# Memory of copies that stand for views, which their views share, and the memory that each was copied from.
_copied: WeakKeyDictionary[torch.UntypedStorage, tuple[ref[torch.UntypedStorage], ...]] = WeakKeyDictionary()


def redistributed_view(local: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec) -> torch.Tensor:
    """Returns `redistributed(..)` for a view of `local`: where it is a copy, `check_is_no_copy` refuses writes."""
    result = redistributed(local, spec, target)
    if result is not local and not transforming() and result.untyped_storage() is not local.untyped_storage():
        mark_as_copy(result, local)
    return result


def mark_as_copy(local: torch.Tensor, source: torch.Tensor) -> None:
    """Marks a tensor of memory of its own that stands for a view of `source`: `check_is_no_copy` refuses writes."""
    if not transforming():
        memory = source.untyped_storage()
        _copied[local.untyped_storage()] = (ref(memory), *_copied.get(memory, ()))


def check_is_no_copy(name: str, local: torch.Tensor) -> None:
    """Raises a RuntimeError if the function of this name would write into a copy that stands for a view.

    Where nothing holds the memory of the viewed tensor any more, neither a tensor nor a graph, no one misses the write.
    """
    if not transforming() and any(memory() is not None for memory in _copied.get(local.untyped_storage(), ())):
        raise RuntimeError(
            f"{name} in place on x[i], or on another view that splits a sharded dim: this view is a copy, so x "
            "would not change. Write to x (x[i] = x[i] + 1 or x[i:i+1].add_(1) instead of x[i].add_(1)), or clone() "
            "the view"
        )


def other_mesh(one: DeviceMesh, other: DeviceMesh) -> ValueError:
    """Returns the error for operands on two meshes."""
    return ValueError(f"operands are on two meshes, {one} and {other}: redistribute(mesh, placements) one of them")


def run(local: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    for step in steps:
        local = step(local)
    return local


def steps(spec: ShardTensorSpec, target: ShardTensorSpec, used: Sequence[int] = ()) -> tuple[Step, ...]:
    """Returns the steps from a local tensor of `spec` to one of `target`; none where both are equal.

    Args:
        used: mesh dims along which a Replicate of the target is R: each rank uses it on its own.
    """
    if spec.shape != target.shape:
        raise ValueError(
            f"redistribute: a tensor of shape {tuple(spec.shape)} cannot have a layout of shape {tuple(target.shape)}"
        )
    if spec.mesh is not target.mesh:
        return _by_one_exchange(spec, target, used)
    if spec.merged is not None or target.merged is not None:
        return _on_merged_mesh(spec, target, used)
    if spec.mesh.communicators is None:
        return (partial(nothing_of, shape=target.local_shape),)
    table = spec.mesh.tables.setdefault("steps", Bounded())
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
    return tuple(_joined(result))


def nothing_of(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Returns the empty part of a rank outside of the mesh, in the graph of `x`."""
    return x if x.shape == shape else x.reshape(-1)[:0].view(shape)


def _used(x: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> torch.Tensor:
    """Converts I to R; does nothing unless a gradient is to be reduced or a torch function mode is active."""
    if (x.requires_grad and torch.is_grad_enabled()) or has_torch_function_unary(x):
        for group, _ in mesh.groups_over(mesh_dims):
            x = spmd.convert(x, group, src=I, dst=R)
    return x


_CONVERT = ROWS["convert", "I", "R"]  # by which a report names the node


class _Together(torch.autograd.Function):
    """Converts several tensors from I to R: their gradients are summed by one all-reduce."""

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


_use_together: Callable[..., tuple[torch.Tensor, ...]] = apply_without_transforms(_Together)


def used_by(step: Step) -> tuple[int, ...] | None:
    """Returns the mesh dims over which a step turns I into R; None for other steps."""
    dims: tuple[int, ...] | None = (
        step.keywords["mesh_dims"] if isinstance(step, partial) and step.func is _used else None
    )
    return dims


def used_together(xs: Sequence[torch.Tensor], mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> Sequence[torch.Tensor]:
    """Converts several tensors that one operation uses from I to R."""
    if not torch.is_grad_enabled() and not has_torch_function_variadic(*xs):
        return xs
    first = xs[0]
    if (
        torch.is_grad_enabled()
        and all(x.requires_grad and x.dtype is first.dtype and x.device == first.device for x in xs)
        and not (has_torch_function_variadic(*xs) or transforming())
    ):
        for group, _ in mesh.groups_over(mesh_dims):
            xs = _use_together(group, *xs) if group.size > 1 else xs
        return xs
    return [_used(x, mesh, mesh_dims) for x in xs]


def _summed(x: torch.Tensor, mesh: DeviceMesh, mesh_dims: tuple[int, ...], used: bool) -> torch.Tensor:
    for group, _ in mesh.groups_over(mesh_dims):
        x = spmd.all_reduce(x, group, src=P, dst=R if used else I)
    return x


def _joined(steps: Sequence[Step]) -> list[Step]:
    """Joins consecutive steps that are equal but for their mesh dim into one step over all of these dims."""
    result: list[Step] = []
    for step in steps:
        before = result[-1] if result else None
        if (
            isinstance(step, partial)
            and isinstance(before, partial)
            and step.func is before.func
            and step.func in (_used, _summed)
            and step.keywords.get("used") == before.keywords.get("used")
        ):
            dims = (*before.keywords["mesh_dims"], *step.keywords["mesh_dims"])
            result[-1] = partial(step.func, **step.keywords | {"mesh_dims": dims})
        else:
            result.append(step)
    return result


def _as_summand(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    return spmd.convert(x, group, src=I, dst=P, expert_mode=True)


def _as_factor(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Returns `x` on the first rank of the group and ones, in the graph of `x`, on the others."""
    return x if int(group.rank) == 0 else linked(torch.ones_like(x), x)


def _product(x: torch.Tensor, group: Communicator) -> torch.Tensor:
    return moves.gather_each(x, group).prod(0)


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
    """Returns the steps along one mesh dim."""
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
        if isinstance(dst, Partial) and _op(dst) == "sum":
            return [partial(moves.pad, communicator=group, dim=src.dim, sizes=src_sizes)]
        gathered = _along(mesh, mesh_dim, src, src_sizes, _REPLICATE, None, False)
        return gathered + _along(mesh, mesh_dim, _REPLICATE, None, dst, None, False)
    if isinstance(src, Replicate):
        if isinstance(dst, Replicate):
            return [partial(_used, mesh=mesh, mesh_dims=(mesh_dim,))] if used else []
        if isinstance(dst, Shard):
            assert dst_sizes is not None
            return [partial(moves.split, communicator=group, dim=dst.dim, sizes=dst_sizes)]
        if _op(dst) in ("max", "min"):  # of equal values, each of which has its share of the gradient
            return [partial(_used, mesh=mesh, mesh_dims=(mesh_dim,))]
        if _op(dst) == "product":
            return [partial(_used, mesh=mesh, mesh_dims=(mesh_dim,)), partial(_as_factor, group=group)]
        summand: list[Step] = [partial(_as_summand, group=group)]
        return summand if _op(dst) == "sum" else [*summand, partial(_scaled, group=group, divide=False)]
    if isinstance(dst, Partial):
        if _op(src) == _op(dst):
            return []
        if {_op(src), _op(dst)} == {"sum", "avg"}:
            return [partial(_scaled, group=group, divide=_op(src) == "avg")]
        whole = _along(mesh, mesh_dim, src, None, _REPLICATE, None, False)
        return whole + _along(mesh, mesh_dim, _REPLICATE, None, dst, None, False)
    if _op(src) in ("max", "min", "product"):
        reduce = partial(_product, group=group) if _op(src) == "product" else None
        reduced: list[Step] = [reduce or partial(extreme, dims=(), groups=(group,), op=_op(src))]
        return reduced + _along(mesh, mesh_dim, _REPLICATE, None, dst, dst_sizes, used)
    if _op(src) == "avg":
        summed = _along(mesh, mesh_dim, Partial(), None, dst, dst_sizes, used)
        return [partial(_scaled, group=group, divide=True), *summed]
    if isinstance(dst, Replicate):
        return [partial(_summed, mesh=mesh, mesh_dims=(mesh_dim,), used=used)]
    assert isinstance(dst, Shard) and dst_sizes is not None
    return [partial(moves.scatter_sum, communicator=group, dim=dst.dim, sizes=dst_sizes)]


def _op(placement: Placement) -> str:
    assert isinstance(placement, Partial)
    return str(placement.reduce_op)


def _scaled(x: torch.Tensor, group: Communicator, divide: bool) -> torch.Tensor:
    """Scales summands of a mean over the ranks to summands of a sum, or back."""
    return x * (1 / comm.size(group)) if divide else x * comm.size(group)


def _on_merged_mesh(spec: ShardTensorSpec, target: ShardTensorSpec, used: Sequence[int]) -> tuple[Step, ...]:
    """Returns the steps on the mesh that merges mesh dims which shard one tensor dim; else one exchange."""
    for layout in (spec, target):
        source, aim = on_merged(spec, layout.groups), on_merged(target, layout.groups)
        if source is not None and aim is not None:
            return steps(source, aim, [i for i, group in enumerate(layout.groups) if {*group} & {*used}])
    return _by_one_exchange(spec, target, used)


def _by_one_exchange(spec: ShardTensorSpec, target: ShardTensorSpec, used: Sequence[int]) -> tuple[Step, ...]:
    """Returns one exchange of all ranks, also to another mesh; a Partial maximum is reduced before it, on its mesh."""
    if used:
        raise ValueError(
            f"an operand on {spec.mesh} cannot be combined with operands on {target.mesh}: redistribute() it first"
        )
    source, sent = (layout if _only_sums(layout) else gradient_spec(layout) for layout in (spec, target))
    return (*steps(spec, source), partial(moved_to_mesh, spec=source, target=sent), *steps(sent, target))


def _only_sums(spec: ShardTensorSpec) -> bool:
    return all(_op(spec.placements[m]) == "sum" for m in spec.partial)

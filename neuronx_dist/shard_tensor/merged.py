"""Functions of tensors of which several mesh dims shard one dim: computed on the mesh that merges these mesh dims.

There the layout is an ordinary one of the same local tensors (`merged_mesh.py`), and the function's handler sees no
other; results get layouts on the tensor's mesh again. Only what asks nothing about mesh dims, such as hooks and
backward, is called as it is.

Operands that have no layout on the merged mesh (`[Shard(0), Replicate()]`, or another dim that is sharded twice) move
first: those, or the tensors on merged dims, whichever are fewer bytes. The report notes each move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from ..comm import current
from ..spmd.watching import active
from ..torch_internals.tensors import foreach_functions, pytree, version_of
from .handlers import FUNCTIONS, UNHANDLED, Handler, named_handler
from .merged_mesh import Groups
from .moves.redistribute import other_mesh
from .placements import Placement, Replicate, Shard
from .report import note
from .spec import ShardTensorSpec, gradient_spec, make_spec, of_merged, on_merged
from .tensor import MergedShardTensor, ShardTensor, leave_leaf, local_of, wrap, wrap_view, written

__all__ = ["on_single_mesh_dims"]

_ROOM = __package__ or ""
_AS_THEY_ARE = frozenset(f"{_ROOM}.ops.{name}" for name in ("queries", "optimizers", "collectives"))


def on_merged_mesh(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Computes `func` of ShardTensors, at least one of which has a dim on several mesh dims."""
    handler = FUNCTIONS.get(func) or named_handler(func) or FUNCTIONS[UNHANDLED]
    if handler.__module__ in _AS_THEY_ARE:
        return handler(func, types, args, kwargs)
    if func in foreach_functions and len(args[0]) > 1:
        return _by_item(func, args, kwargs)
    return _computed(handler, func, types, args, kwargs)


def on_single_mesh_dims(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a function that torch does not dispatch: it is called with each tensor dim on one mesh dim."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, MergedShardTensor) for x in (*args, *kwargs.values())):
            return _computed(lambda func, types, args, kwargs: function(*args, **kwargs), function, (), args, kwargs)
        return function(*args, **kwargs)

    return called


def _dispatched(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return _computed(ShardTensor.__torch_dispatch__, func, types, args, kwargs)


def _by_item(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function of lists for the items at each place, which may be laid out in another way than others."""
    count = len(args[0])
    results = [
        func(*(x[i : i + 1] if isinstance(x, (list, tuple)) and len(x) == count else x for x in args), **kwargs)
        for i in range(count)
    ]
    if func.__name__.endswith("_") or results[0] is None:
        return None if results[0] is None else args[0]
    return tuple(item for result in results for item in result)


def _computed(handler: Handler, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    flat, tree = pytree.tree_flatten((args, kwargs))
    places = [i for i, x in enumerate(flat) if isinstance(x, ShardTensor)]
    operands = [flat[i] for i in places]
    specs = tuple(x._spec for x in operands)
    mesh, *others = dict.fromkeys(spec.mesh for spec in specs)
    if others:
        raise other_mesh(mesh, others[0])
    if active() is not None and any(current().mesh.axis_of(group.ranks) is None for group in mesh.communicators or ()):
        raise NotImplementedError(
            f"the type checker follows a tensor dim on several mesh dims where these are axes of the job: a mesh of "
            f"{mesh.shape} has others; use DeviceMesh.from_axes"
        )
    name = getattr(func, "__name__", str(func))
    writes = kwargs.get("out", args[0] if args and _writes(name, kwargs) else None)
    fixed = writes._spec if isinstance(writes, ShardTensor) else None
    if isinstance(writes, ShardTensor) and "out" not in kwargs:
        leave_leaf(writes)
    groups, moves = _plan(specs, tuple(x.element_size() for x in operands), fixed)
    merged: list[ShardTensor] = []
    for x, target in zip(operands, moves):
        source = x
        if target is not x._spec:
            note(name, f"{list(x.placements)} of {tuple(x.shape)} moves to {list(target.placements)}")
            source = x.redistribute(mesh, target.placements, sizes=target.sizes)
        layout = on_merged(target, groups)
        assert layout is not None
        same = next((i for i, y in enumerate(operands[: len(merged)]) if y is x), None)
        merged.append(wrap(local_of(source), layout) if same is None else merged[same])
    before = [(y._local, version_of(y._local)) for y in merged]
    for i, y in zip(places, merged):
        flat[i] = y
    merged_args, merged_kwargs = pytree.tree_unflatten(flat, tree)
    result = handler(func, types, merged_args, merged_kwargs)
    for x, target, y, (local, version) in zip(operands, moves, merged, before):
        if y._local is not local or version_of(local) != version:
            if target is not x._spec or y._local is not local:
                raise RuntimeError(
                    f"{name} wrote to a copy of a tensor of {list(x.placements)}: redistribute() all operands to the "
                    "layout of the tensor that is written first"
                )
            written(x)

    def back(y: Any) -> Any:
        if not isinstance(y, ShardTensor) or y._spec.mesh is mesh:
            return y
        same = next((x for x, z in zip(operands, merged) if z is y), None)
        if same is not None:
            return same
        spec = of_merged(y._spec, mesh, groups)
        family = getattr(y, "_family", None)
        source = next((x for x, z in zip(operands, merged) if family and getattr(z, "_family", None) is family), None)
        again = wrap(y._local, spec) if source is None else wrap_view(y._local, spec, source)
        again._foreign = again._foreign or y._foreign
        return again

    return pytree.tree_map(back, result)


def _writes(name: str, kwargs: Any) -> bool:
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or name.startswith("__i") or bool(kwargs.get("inplace"))


def _plan(
    specs: tuple[ShardTensorSpec, ...], item_sizes: tuple[int, ...], fixed: ShardTensorSpec | None
) -> tuple[Groups, tuple[ShardTensorSpec, ...]]:
    """Returns the groups of mesh dims that are merged, and the layout to which each operand moves before.

    Args:
        item_sizes: bytes of an element of each operand.
        fixed: layout of an operand that is written, and so does not move.
    """
    mesh = specs[0].mesh
    key = (_plan, specs, item_sizes, fixed)
    if key in mesh.plans:
        plan: tuple[Groups, tuple[ShardTensorSpec, ...]] = mesh.plans[key]
        return plan
    alone = tuple((m,) for m in range(mesh.ndim))
    costs = {
        groups: sum(
            spec.shape.numel() * size for spec, size in zip(specs, item_sizes) if on_merged(spec, groups) is None
        )
        for groups in dict.fromkeys((*(spec.groups for spec in specs if spec.merged is not None), alone))
        if fixed is None or on_merged(fixed, groups) is not None
    }
    groups = min(costs, key=costs.__getitem__)
    plan = mesh.plans[key] = groups, tuple(_moved(spec, groups, specs) for spec in specs)
    return plan


def _moved(spec: ShardTensorSpec, groups: Groups, specs: Sequence[ShardTensorSpec]) -> ShardTensorSpec:
    """Returns the layout with a layout on the merged mesh to which an operand moves; its own if that has one.

    It is that of another operand of the same shape; else each mesh dim that stands in the way is replicated.
    """
    if on_merged(spec, groups) is not None:
        return spec
    for other in specs:
        if other.shape == spec.shape and other.merged is not None and on_merged(other, groups) is not None:
            return gradient_spec(other)
    placements: list[Placement] = list(spec.placements)
    sizes = list(spec.sizes)
    used = {m for other in specs if other.merged is None for m, _ in other.sharded}
    for group in spec.groups:  # of mesh dims that shard one dim, one goes on: the last that no other operand needs
        if len(group) > 1:
            stays = next((m for m in reversed(group) if m not in used), group[-1])
            for m in group:
                placements[m], sizes[m] = (spec.placements[m] if m == stays else Replicate()), None
    for group in groups:
        if len({placements[m] for m in group}) > 1 or (len(group) > 1 and isinstance(placements[group[0]], Shard)):
            for m in group:
                placements[m], sizes[m] = Replicate(), None
    return make_spec(spec.mesh, placements, spec.shape, sizes)


FUNCTIONS[MergedShardTensor.__torch_function__] = on_merged_mesh
FUNCTIONS[MergedShardTensor.__torch_dispatch__] = _dispatched

"""Layouts by labels of dims: decides which dims stay sharded, and brings operands there (`inside`).

`x[b, k] @ w[k, n] -> y[b, n]`, pointwise functions, views of single dims and normalisations are described by the labels
of their dims alone. A `OperandPlan` for given layouts is computed once, and stored on the mesh.

On each mesh dim at most one label is sharded: that of the largest operand that shards a label there. Operands that have
the label get shards of equal sizes; every rank uses the others whole (type R). A result without the label is Partial.
Where operands are sharded along labels alone that must be whole, their shards move to another label of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from ..call_site import call_site
from ..rules import RULES, Dims, Spec
from ..rules.containers import substituted
from ..spmd import no_typecheck
from ..spmd.watching import active
from .device_mesh import DeviceMesh
from .handlers import check_promotion
from .moves.redistribute import Step, other_mesh, steps, used_by, used_together
from .placements import Partial, Placement, Replicate, Shard
from .report import current_function, note, watched
from .spec import ShardTensorSpec, chunk_sizes, make_spec
from .tensor import ShardTensor, local_of
from .typed import promoted

__all__ = ["Labels", "New", "inside", "labels_of", "one_mesh", "planned", "rule_of"]

Label = Hashable
_REPLICATE, _PARTIAL = Replicate(), Partial()


class New(NamedTuple):
    """Dim of the result that no operand has."""

    size: int


class Labels(NamedTuple):
    """Labels of the dims of an operation's operands and result.

    Attributes:
        operands: for each operand, a label for each dim; None for a dim that is broadcast.
        out: labels of the result; a `New` for a dim that no operand has.
        whole: labels that must not be sharded.
        added: operands that are added to a result that is a sum: they are Partial where the result is.
        linear: True if the operation is linear in each operand: where one is Partial and nothing is sharded, the result
            is Partial.
    """

    operands: Sequence[Sequence[Label]]
    out: Sequence[Label]
    whole: frozenset[Label] = frozenset()
    added: frozenset[int] = frozenset()
    linear: bool = False


class OperandPlan(NamedTuple):
    """Plan of an operation: the steps that move its operands, by index, and the layout of the result.

    Attributes:
        together: mesh dims, and the operands whose gradients are summed over them by one all-reduce.
        gathered: operands whose shards are put together, since the operation needs the operand whole.
    """

    moved: tuple[tuple[int, tuple[Step, ...]], ...]
    together: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    gathered: tuple[int, ...]
    spec: ShardTensorSpec


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a function of a spec and hashable values: it runs once for equal arguments."""

    def looked_up(spec: ShardTensorSpec, *args: Any) -> Any:
        plans = spec.mesh.plans
        key = (function, spec, *args)
        try:
            return plans[key]
        except KeyError:
            result = plans[key] = function(spec, *args)
            return result

    looked_up.__doc__, looked_up.__name__ = function.__doc__, function.__name__
    return looked_up


def one_mesh(operands: Sequence[Any], function: str) -> DeviceMesh:
    """Returns the mesh of the ShardTensors among operands (at least one); plain tensors are promoted.

    Raises:
        ValueError: the ShardTensors are on different meshes.
    """
    mesh, *others = dict.fromkeys(x._spec.mesh for x in operands if isinstance(x, ShardTensor))
    if others:
        raise other_mesh(mesh, others[0])
    for x in operands:
        if isinstance(x, torch.Tensor) and not isinstance(x, ShardTensor):
            check_promotion(x, function)
    return mesh


def inside(
    rule: Callable[..., Labels | Spec],
    operands: Sequence[Any],
    *extras: Hashable,
    result: ShardTensorSpec | None = None,
) -> tuple[list[Any], ShardTensorSpec]:
    """Returns the local operands of an operation, and the layout of its result.

    Args:
        rule: `rule(*shapes, *extras)` returns the labels, or a spec of `rules`, as `rule_of` of a torch function does.
            The rule's name stands for the function in warnings and reports.
        operands: ShardTensors (at least one), plain tensors, and None for an absent operand.
        result: the layout that the result must have (in place).
    """
    key: list[Any] = [rule, result, *extras]
    locals_: list[Any] = []
    mesh = None
    plain: list[torch.Tensor] = []
    for x in operands:
        if isinstance(x, ShardTensor):
            spec = x._spec
            key.append(spec)
            locals_.append(local_of(x) if x._foreign else x._local)
            if mesh is None:
                mesh = spec.mesh
            elif mesh is not spec.mesh:
                mesh = one_mesh(operands, rule.__name__)
        else:
            locals_.append(x)
            if x is None:
                key.append(None)
            else:
                check_promotion(x, rule.__name__)
                plain.append(x)
                key.append(x.shape)
    assert mesh is not None
    if plain and active() is not None:
        for x in plain:
            promoted(x, mesh)
    full_key = tuple(key)
    plan = mesh.plans.get(full_key)
    if plan is None:
        specs = [
            x._spec if isinstance(x, ShardTensor) else None if x is None else make_spec(mesh, None, x.shape)
            for x in operands
        ]
        labels = rule(*(None if operand_spec is None else operand_spec.shape for operand_spec in specs), *extras)
        if isinstance(labels, Spec):
            labels = _labels(
                rule.__name__, labels, [None if operand_spec is None else operand_spec.shape for operand_spec in specs]
            )
        plan = mesh.plans[full_key] = _plan(labels, specs, result)
    if plan.gathered and watched():
        for x in (operands[i] for i in plan.gathered):
            num_bytes = x.numel() * x.element_size()
            name = current_function() or rule.__name__.strip("_")
            note(name, f"gathers {num_bytes:,} bytes, of {tuple(x.shape)}, at {call_site()}")
    for i, todo in plan.moved:
        local = locals_[i]
        shared = operands[i]._used if isinstance(operands[i], ShardTensor) else None
        if shared is not None and used_by(todo[0]) is not None:
            locals_[i] = shared
            continue
        for step in todo:
            local = step(local)
        locals_[i] = local
    for mesh_dims, indices in plan.together:
        for i, local in zip(indices, used_together([locals_[i] for i in indices], mesh, mesh_dims)):
            locals_[i] = local
    return locals_, plan.spec


@cache
def rule_of(function: Callable[..., Any]) -> Callable[..., Labels]:
    """Returns the builder of a torch function's labels, from global shapes and other arguments, by its rule."""

    def labels(*arguments: Any) -> Labels:
        return labels_of(function, arguments, {})

    labels.__name__ = RULES[function].name
    return labels


def labels_of(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Labels:
    """Returns the labels of a call by its function's rule; `torch.Size` stands for a tensor, None for an absent one."""
    rule = RULES[function]
    assert rule.spec is not None
    shapes: list[torch.Size | None] = []

    def meta(shape: torch.Size | None) -> torch.Tensor | None:
        shapes.append(shape)
        return None if shape is None else torch.empty(shape, device="meta")

    with no_typecheck():
        tensors = substituted(tuple(args), (torch.Size, type(None)), meta)
        spec = rule.spec(*tensors, **kwargs)
        affine = rule.affine is not None and rule.affine(*tensors, **kwargs)
    count = len(spec.ins)
    groups = [frozenset(range(count) if group == (-1,) else group) & frozenset(range(count)) for group in rule.linear]
    return _labels(rule.name, spec, shapes, () if affine else groups, affine)


def _labels(
    name: str,
    spec: Spec,
    shapes: Sequence[torch.Size | None],
    linear: Sequence[frozenset[int]] = (),
    affine: bool = False,
) -> Labels:
    """Returns the labels of a spec. Labels that are fixed, factors of a dim, or reduced other than by a sum are whole.

    Args:
        shapes: shapes of the operands, in the order of `ins`; None for an absent one.
        linear: groups of operands in which the call is linear.

    Raises:
        RuntimeError: the shapes do not fit together.
    """
    at = [i for i, shape in enumerate(shapes) if shape is not None]  # places of the spec's operands
    for i, dims in zip(at, spec.ins, strict=True):
        if dims is not None and shapes[i] != tuple(prod(spec.sizes[label] for label in dim) for dim in dims):
            raise RuntimeError(
                f"{name}: operands of shapes {[tuple(shape or ()) for shape in shapes]} do not match; a plain tensor "
                "counts as the whole, equal on all ranks: ShardTensor.from_local takes this rank's part"
            )
    whole = {label for dims in (*spec.ins, *spec.outs) for dim in dims or () if len(dim) > 1 for label in dim}
    whole |= spec.fixed.keys() | spec.ranges.keys() | spec.weak
    added: frozenset[int] = frozenset()
    for label, how in spec.reduced.items():
        holders = {i for i, dims in enumerate(spec.ins) if any(label in dim for dim in dims or ())}
        others = frozenset(i for group in linear if group & holders for i in group - holders)
        added = added or others
        if how != "sum" or affine or others != added:
            whole.add(label)
    alone = {i for group in linear if len(group) == 1 for i in group}
    operands: list[Any] = [()] * len(shapes)
    for i, dims in zip(at, spec.ins, strict=True):
        operands[i] = _names(dims)
    known = {name for names in operands for name in names}
    out = [
        name if name in known and name is not None else New(prod(spec.sizes[label] for label in dim))
        for name, dim in zip(_names(spec.outs[0]), spec.outs[0])
    ]
    return Labels(operands, out, frozenset(whole), frozenset(at[i] for i in added), len(alone) == len(spec.ins))


def _names(dims: Dims | None) -> tuple[Label, ...]:
    return tuple(dim[0] if len(dim) == 1 else None for dim in dims or ())


def _plan(labels: Labels, specs: Sequence[ShardTensorSpec | None], result: ShardTensorSpec | None) -> OperandPlan:
    mesh = next(spec.mesh for spec in specs if spec is not None)
    lengths = {
        label: size
        for spec, names in zip(specs, labels.operands)
        if spec is not None
        for label, size in zip(names, spec.shape)
        if label is not None
    }
    out_shape = torch.Size([name.size if isinstance(name, New) else lengths[name] for name in labels.out])
    placements: list[list[Placement]] = [[] for _ in specs]
    sizes: list[list[tuple[int, ...] | None]] = [[] for _ in specs]
    out_placements: list[Placement] = []
    out_sizes: list[tuple[int, ...] | None] = []
    used: list[int] = []
    used_labels: set[Label] = set()
    for m in range(mesh.ndim):
        label, along = _sharded_label(labels, specs, m, used_labels, result, out_shape)
        summed = _one_sum(specs, m) if label is None and labels.linear and result is None else None
        if label is not None:
            used_labels.add(label)
        if label is not None or summed is not None:
            used.append(m)
        is_sum = summed is not None or (label is not None and label not in labels.out)
        for i, spec in enumerate(specs):
            names = labels.operands[i]
            if spec is None:
                continue
            placement: Placement = _REPLICATE
            if is_sum and i in labels.added:
                placement = _PARTIAL
            elif label is not None and label in names:
                placement = Shard(tuple(names).index(label))
            elif summed is not None and m in spec.partial:
                placement = spec.placements[m]
            placements[i].append(placement)
            sizes[i].append(along if isinstance(placement, Shard) else None)
        if is_sum:
            out_placements.append(summed or _PARTIAL)
            out_sizes.append(None)
        else:
            out_placements.append(_REPLICATE if label is None else Shard(tuple(labels.out).index(label)))
            out_sizes.append(along)
    operands = []
    for i, spec in enumerate(specs):
        if spec is not None:
            todo = steps(spec, make_spec(mesh, placements[i], spec.shape, sizes[i]), used)
            operands += [(i, todo)] if todo else []
    users: dict[tuple[int, ...], list[int]] = {}
    for i, todo in operands:
        mesh_dims = used_by(todo[0]) if len(todo) == 1 else None
        if mesh_dims is not None:
            users.setdefault(mesh_dims, []).append(i)
    together = tuple((mesh_dims, tuple(indices)) for mesh_dims, indices in users.items() if len(indices) > 1)
    alone = tuple((i, todo) for i, todo in operands if not any(i in indices for _, indices in together))
    gathered = tuple(
        i
        for i, spec in enumerate(specs)
        if spec is not None and any(isinstance(placements[i][m], Replicate) for m, _ in spec.sharded)
    )
    return OperandPlan(alone, together, gathered, make_spec(mesh, out_placements, out_shape, out_sizes))


def _sharded_label(
    labels: Labels,
    specs: Sequence[ShardTensorSpec | None],
    m: int,
    used_labels: set[Label],
    result: ShardTensorSpec | None,
    out_shape: torch.Size,
) -> tuple[Label | None, tuple[int, ...] | None]:
    """Returns the label that is sharded on mesh dim `m`, and the sizes of its shards."""
    if result is not None:
        placement = result.placements[m]
        return (labels.out[placement.dim], result.sizes[m]) if isinstance(placement, Shard) else (None, None)
    weights: dict[tuple[Label, tuple[int, ...]], int] = {}
    for spec, names in zip(specs, labels.operands):
        if spec is None or not isinstance(placement := spec.placements[m], Shard):
            continue
        label, along = names[placement.dim], spec.sizes[m]
        if label is None or label in labels.whole or label in used_labels:
            continue
        assert along is not None
        weights[label, along] = weights.get((label, along), 0) + spec.shape.numel()
    if not weights:
        return _other_label(labels, specs, m, used_labels, out_shape)
    return max(weights, key=weights.__getitem__)


def _other_label(
    labels: Labels,
    specs: Sequence[ShardTensorSpec | None],
    m: int,
    used_labels: set[Label],
    out_shape: torch.Size,
) -> tuple[Label | None, tuple[int, ...] | None]:
    """Returns a label that operands with shards of whole labels have, and sizes of its shards.

    Shards of these operands move to the label by one exchange, where they would be gathered otherwise. It is a label of
    the result, or a contracted one where the result, which is reduced then, has fewer elements than these operands.
    """
    blocked = [
        (spec, names)
        for spec, names in zip(specs, labels.operands)
        if spec is not None and isinstance(spec.placements[m], Shard) and spec.merged is None
    ]
    lengths: dict[Label, int] = {}
    for spec, names in blocked:
        lengths |= {label: size for label, size in zip(names, spec.shape) if label is not None and size > 1}
    used = {
        names[dim]
        for spec, names in zip(specs, labels.operands)
        if spec is not None
        for _, dim in spec.sharded
        if names
    }
    free = [
        label
        for label in lengths
        if label not in labels.whole | used_labels | used and all(label in names for _, names in blocked)
    ]
    left = [label for label in free if label in labels.out]
    if not left and out_shape.numel() < sum(spec.shape.numel() for spec, _ in blocked):
        left = free
    if not left:
        return None, None
    mesh = next(spec.mesh for spec in specs if spec is not None)
    label = max(left, key=lengths.__getitem__)
    return label, chunk_sizes(lengths[label], mesh.shape[m])


def _one_sum(specs: Sequence[ShardTensorSpec | None], m: int) -> Placement | None:
    """Returns the placement of the only operand that is Partial on mesh dim `m`, if it is a sum or a mean."""
    sums = [spec.placements[m] for spec in specs if spec is not None and m in spec.partial]
    return sums[0] if sums in ([_PARTIAL], [Partial("avg")]) else None

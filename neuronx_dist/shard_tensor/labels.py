"""Layouts by labels: what of an operation stays sharded, when each dim of its operands has a label.

`x[b, k] @ w[k, n] -> y[b, n]`, and pointwise functions, views of single dims and normalisations as well, are told by
the labels of their dims alone. A `Plan` for given layouts is computed once, and kept on the mesh.

On each mesh dim one label at most is sharded, the one of the largest operand that shards it. Operands that have the
label get shards of the same sizes, all others are used whole by every rank (type R). A result without it is Partial.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from ..call_site import call_site
from ..spmd.watching import active
from .device_mesh import DeviceMesh
from .handlers import check_promotion
from .placements import Partial, Placement, Replicate, Shard
from .redistribute import Step, other_mesh, steps, used_by, used_together
from .report import note, watched
from .spec import ShardTensorSpec, make_spec
from .tensor import ShardTensor, local_of
from .typed import promoted

__all__ = ["Labels", "New", "inside", "one_mesh", "planned"]

Label = Hashable
_REPLICATE, _PARTIAL = Replicate(), Partial()


class New(NamedTuple):
    """A dim of the result that no operand has."""

    size: int


class Labels(NamedTuple):
    """What an operation does to dims.

    Attributes:
        operands: of each operand, a label for each dim; None for one that is broadcast.
        out: of the result; a `New` for a dim that no operand has.
        whole: labels that must not be sharded.
        added: operands that are added to a result, which is a sum: they are Partial where it is.
        linear: in each operand: where one is Partial and nothing is sharded, the result is.
    """

    operands: Sequence[Sequence[Label]]
    out: Sequence[Label]
    whole: frozenset[Label] = frozenset()
    added: frozenset[int] = frozenset()
    linear: bool = False


class Plan(NamedTuple):
    """How operands are brought where they are used, by their index, and the layout of the result.

    Attributes:
        together: mesh dims, and the operands whose gradients are summed over them by one all-reduce.
        gathered: operands of which shards are put together, since the operation needs them whole.
    """

    moved: tuple[tuple[int, tuple[Step, ...]], ...]
    together: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    gathered: tuple[int, ...]
    spec: ShardTensorSpec


def planned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function of specs and hashable values, the first argument a spec: it runs once for equal ones."""

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
    """The mesh of the ShardTensors among some operands, one at least; plain tensors are promoted (`check_promotion`).

    Raises:
        ValueError: they are on different meshes.
    """
    mesh, *others = dict.fromkeys(x._spec.mesh for x in operands if isinstance(x, ShardTensor))
    if others:
        raise other_mesh(mesh, others[0])
    for x in operands:
        if isinstance(x, torch.Tensor) and not isinstance(x, ShardTensor):
            check_promotion(x, function)
    return mesh


def inside(
    rule: Callable[..., Labels], operands: Sequence[Any], *extras: Hashable, result: ShardTensorSpec | None = None
) -> tuple[list[Any], ShardTensorSpec]:
    """The local operands of an operation, and the layout of its result. At least one is a ShardTensor.

    Args:
        rule: `rule(*shapes, *extras)` gives the labels. Its name stands for the function in warnings and reports.
        operands: ShardTensors, plain tensors, and None for one that is left out.
        result: what the layout of the result must be (in place).
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
        labels = rule(*(None if each is None else each.shape for each in specs), *extras)
        plan = mesh.plans[full_key] = _plan(labels, specs, result)
    if plan.gathered and watched():
        for x in (operands[i] for i in plan.gathered):
            num_bytes = x.numel() * x.element_size()
            note(rule.__name__.strip("_"), f"gathers {num_bytes:,} bytes, of {tuple(x.shape)}, at {call_site()}")
    for i, todo in plan.moved:
        local = locals_[i]
        for step in todo:
            local = step(local)
        locals_[i] = local
    for mesh_dims, indices in plan.together:
        for i, local in zip(indices, used_together([locals_[i] for i in indices], mesh, mesh_dims)):
            locals_[i] = local
    return locals_, plan.spec


def _plan(labels: Labels, specs: Sequence[ShardTensorSpec | None], result: ShardTensorSpec | None) -> Plan:
    mesh = next(spec.mesh for spec in specs if spec is not None)
    lengths = {
        label: size
        for spec, names in zip(specs, labels.operands)
        if spec is not None
        for label, size in zip(names, spec.shape)
        if label is not None
    }
    out_shape = torch.Size([each.size if isinstance(each, New) else lengths[each] for each in labels.out])
    placements: list[list[Placement]] = [[] for _ in specs]
    sizes: list[list[tuple[int, ...] | None]] = [[] for _ in specs]
    out_placements: list[Placement] = []
    out_sizes: list[tuple[int, ...] | None] = []
    used: list[int] = []
    taken: set[Label] = set()
    for m in range(mesh.ndim):
        label, along = _sharded_label(labels, specs, m, taken, result)
        summed = label is None and labels.linear and result is None and _one_is_a_sum(specs, m)
        if label is not None:
            taken.add(label)
        if label is not None or summed:
            used.append(m)
        is_sum = summed or (label is not None and label not in labels.out)
        for i, spec in enumerate(specs):
            names = labels.operands[i]
            if spec is None:
                continue
            placement: Placement = _REPLICATE
            if is_sum and i in labels.added:
                placement = _PARTIAL
            elif label is not None and label in names:
                placement = Shard(tuple(names).index(label))
            elif summed and m in spec.partial:
                placement = spec.placements[m]
            placements[i].append(placement)
            sizes[i].append(along if isinstance(placement, Shard) else None)
        if is_sum:
            out_placements.append(_PARTIAL)
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
    alone = tuple(each for each in operands if not any(each[0] in indices for _, indices in together))
    gathered = tuple(
        i
        for i, spec in enumerate(specs)
        if spec is not None and any(isinstance(placements[i][m], Replicate) for m, _ in spec.sharded)
    )
    return Plan(alone, together, gathered, make_spec(mesh, out_placements, out_shape, out_sizes))


def _sharded_label(
    labels: Labels, specs: Sequence[ShardTensorSpec | None], m: int, taken: set[Label], result: ShardTensorSpec | None
) -> tuple[Label | None, tuple[int, ...] | None]:
    """The label that is sharded on mesh dim `m`, and the sizes of its shards."""
    if result is not None:
        placement = result.placements[m]
        return (labels.out[placement.dim], result.sizes[m]) if isinstance(placement, Shard) else (None, None)
    weights: dict[tuple[Label, tuple[int, ...]], int] = {}
    for spec, names in zip(specs, labels.operands):
        if spec is None or not isinstance(placement := spec.placements[m], Shard):
            continue
        label, along = names[placement.dim], spec.sizes[m]
        if label is None or label in labels.whole or label in taken:
            continue
        assert along is not None
        weights[label, along] = weights.get((label, along), 0) + spec.shape.numel()
    if not weights:
        return None, None
    return max(weights, key=weights.__getitem__)


def _one_is_a_sum(specs: Sequence[ShardTensorSpec | None], m: int) -> bool:
    sums = [spec.placements[m] for spec in specs if spec is not None and m in spec.partial]
    return len(sums) == 1 and sums == [_PARTIAL]

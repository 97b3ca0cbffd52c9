"""Functions without a handler on each rank's shards, if all sharded labels are free: `on_shards`.

The rules that the type checker reads (`rules`) give each dim labels; equal labels are positions that belong together.
Values neither mix along a free label nor are picked from it: the function of a shard is the shard of the function. So a
free label may be sharded, with equal shards in all operands that have it (`rules/local_call.py`). If it is summed or
averaged over, the result is a sum over the ranks, or a mean by the global count.

Integers of a call may count global positions (`F.affine_grid(theta, size)`). The local call has the integers with which
its label spec is the global one with shorter labels. It is looked for on the shards of all ranks, so that all ranks
decide equally. A rank with an empty shard calls the function on one position, to learn the dtype of the result, since
many functions accept no empty tensors.

Where a sharded label is not free, but another one is, in all sharded operands, they move to it by one exchange:
for a Fourier transform along a sharded dim to another dim, as pencils do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch

from ..rules import RULES, Dims, Rule, Spec
from ..rules import operands as operands_of
from ..rules.containers import substituted
from ..rules.local_call import Arguments, Cut, TensorSlot, free_cuts, free_labels, local_arguments
from ..spmd import no_typecheck
from ..torch_internals.tensors import base_of_view, pytree
from .device_mesh import DeviceMesh
from .labels import Labels, inside
from .merged_mesh import can_be_merged
from .moves.exchange import linked
from .moves.redistribute import redistributed
from .placements import Partial, Placement, Replicate, Shard
from .spec import ShardTensorSpec, chunk_sizes, gradient_spec, joined_sizes, make_spec
from .tensor import ShardTensor, wrap_result

__all__ = ["on_shards"]

_MISSING = object()


class _Call(NamedTuple):
    """Call without its tensors, equal for calls of equal layouts, dtypes and other arguments.

    Attributes:
        leaves: leaves of the arguments; None for a tensor.
        positions: indices of the tensors among the leaves.
        specs, dtypes: layouts and dtypes of the tensors; the layout of a plain tensor is Replicate.
    """

    func: Callable[..., Any]
    tree: Any
    leaves: tuple[Any, ...]
    positions: tuple[int, ...]
    specs: tuple[ShardTensorSpec, ...]
    dtypes: tuple[torch.dtype, ...]

    def arguments(self, tensors: Sequence[Any], changed: dict[int, Any]) -> Any:
        """Returns `(args, kwargs)` with these tensors, and the leaves in `changed` replaced."""
        flat = list(self.leaves)
        for i, x in changed.items():
            flat[i] = x
        for i, x in zip(self.positions, tensors):
            flat[i] = x
        return pytree.tree_unflatten(flat, self.tree)


class _ShardCallPlan(NamedTuple):
    """Plan of a rank's call on its shards.

    Attributes:
        order: numbers of the tensors in the order of the rule's operands.
        labels: labels of their dims, for `inside`.
        counts: the leaves of the arguments that have other integers in this rank's call.
        padded: shape of each tensor with which the function is called if a shard is empty; None: no shard is.
        results: layouts of the results.
        share: factor that makes the local mean a summand of the global one.
    """

    order: tuple[int, ...]
    labels: Labels
    counts: dict[int, Any]
    padded: tuple[torch.Size, ...] | None
    results: tuple[ShardTensorSpec, ...]
    share: float


def on_shards(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Computes `func(*args, **kwargs)` on this rank's shards, moved to other dims where these alone are independent.

    Returns NotImplemented if no dims of the sharded operands are.
    """
    rule = RULES.get(func)
    if rule is None or rule.kind != "op" or rule.spec is None or rule.inplace is not None:
        return NotImplemented
    call, tensors = _split(func, args, kwargs)
    plan = _looked_up(_planned, call, rule)
    if plan is None and (specs := _looked_up(_moved, call, rule)) is not None:
        specs = [spec if isinstance(x, ShardTensor) else old for x, spec, old in zip(tensors, specs, call.specs)]
        if any(spec.merged is not None for spec in specs):
            args, kwargs = call.arguments([_in_layout(x, spec) for x, spec in zip(tensors, specs)], {})
            return func(*args, **kwargs)
        call = call._replace(specs=tuple(specs))
        plan = _looked_up(_planned, call, rule)
        if plan is not None:
            tensors = [_in_layout(x, spec) for x, spec in zip(tensors, specs)]
    return NotImplemented if plan is None else _called(call, plan, tensors)


def _in_layout(x: torch.Tensor, spec: ShardTensorSpec) -> torch.Tensor:
    return x.redistribute(placements=spec.placements, sizes=spec.sizes) if isinstance(x, ShardTensor) else x


def _split(func: Callable[..., Any], args: Any, kwargs: Any) -> tuple[_Call, list[torch.Tensor]]:
    """Returns a call without its tensors, and these."""
    flat, tree = pytree.tree_flatten((args, kwargs))
    positions = tuple(i for i, x in enumerate(flat) if isinstance(x, torch.Tensor))
    tensors = [flat[i] for i in positions]
    mesh = next(x._spec.mesh for x in tensors if isinstance(x, ShardTensor))
    specs = tuple(x._spec if isinstance(x, ShardTensor) else make_spec(mesh, None, x.shape) for x in tensors)
    for i in positions:
        flat[i] = None
    return _Call(func, tree, tuple(flat), positions, specs, tuple(x.dtype for x in tensors)), tensors


def _looked_up(planned: Callable[[_Call, Rule], Any], call: _Call, rule: Rule) -> Any:
    """Returns `planned(call, rule)`, computed once for equal calls."""
    plans = call.specs[0].mesh.plans
    key = planned, rule, call, tuple(map(type, call.leaves))  # 2 and 2.0 are equal
    try:
        plan = plans.get(key, _MISSING)
        if plan is _MISSING:
            plan = plans[key] = planned(call, rule)
    except TypeError:  # an argument is not hashable
        plan = planned(call, rule)
    return plan


def _called(call: _Call, plan: _ShardCallPlan, tensors: Sequence[torch.Tensor]) -> Any:
    locals_, _ = inside(_as_given, [tensors[number] for number in plan.order], plan.labels)
    local_tensors: list[Any] = [None] * len(tensors)
    for number, local in zip(plan.order, locals_):
        local_tensors[number] = local
    if plan.padded is None:
        outcome, has_values = _apply(call, local_tensors, plan), True
    else:
        outcome, has_values = _of_one_position(call, local_tensors, plan)
    results, tree = pytree.tree_flatten(outcome)
    specs = iter(plan.results)
    for i, y in enumerate(results):
        if not isinstance(y, torch.Tensor):
            continue
        spec = next(specs)
        if not has_values:
            nothing = torch.zeros(spec.local_shape, dtype=y.dtype, device=local_tensors[0].device)
            y = linked(nothing, *local_tensors) if y.requires_grad else nothing
        assert y.shape == spec.local_shape, (
            f"the rule of {call.func} predicts the local shape {spec.local_shape}, but the result has {y.shape}"
        )
        y = y * plan.share if plan.share != 1 else y
        results[i] = wrap_result(redistributed(y, spec, gradient_spec(spec)), gradient_spec(spec), tensors)
    return pytree.tree_unflatten(results, tree)


def _apply(call: _Call, tensors: Sequence[Any], plan: _ShardCallPlan) -> Any:
    args, kwargs = call.arguments(tensors, plan.counts)
    return call.func(*args, **kwargs)


def _of_one_position(call: _Call, local_tensors: Sequence[Any], plan: _ShardCallPlan) -> tuple[Any, bool]:
    """Calls the function for one position on a rank with an empty shard, to learn the dtypes of the results.

    The tensors have no values, or are ones if the function needs values.

    Returns:
        The results, and False. If a result is a view of an operand, the results on the empty shards, and True: values
        that are written into the view must enter the operand's graph.
    """
    assert plan.padded is not None

    def of(device: str | torch.device) -> tuple[Any, bool]:
        tensors = []
        for x, shape in zip(local_tensors, plan.padded or ()):
            number = 1 if x.is_floating_point() or x.is_complex() else 0  # an index
            tensors.append(torch.full(shape, number, dtype=x.dtype, device=device).requires_grad_(x.requires_grad))
        result = _apply(call, tensors, plan)
        viewed = any(
            isinstance(y, torch.Tensor) and any(base_of_view(y) is x for x in tensors)
            for y in pytree.tree_flatten(result)[0]
        )
        return (_apply(call, local_tensors, plan), True) if viewed else (result, False)

    device = local_tensors[0].device
    # Autocast ignores tensors without values, and many functions of ones have no result (the inverse of a matrix).
    first, second = (device, "meta") if torch.is_autocast_enabled(device.type) else ("meta", device)
    with no_typecheck():
        try:
            return of(first)
        except RuntimeError:  # torch has no such call, or no such result
            return of(second)


def _as_given(*arguments: Any) -> Labels:
    labels: Labels = arguments[-1]
    return labels


# --- planning


def _planned(call: _Call, rule: Rule) -> _ShardCallPlan | None:
    """Returns the plan of a call; None if shards are not independent, or the rule cannot tell."""
    with no_typecheck():
        whole, affine, order, arguments = _labelled(call, rule)
        if whole is None:
            return None
        shards = [{m: (dim, call.specs[i].sizes[m] or ()) for m, dim in call.specs[i].sharded} for i in order]
        cuts = free_cuts(whole, affine, shards)
        return _plan_of(call, rule, arguments, order, whole, cuts) if cuts else None


def _labelled(call: _Call, rule: Rule) -> tuple[Spec | None, bool, tuple[int, ...], Arguments]:
    """Returns the label spec of a call (None: unknown), True if it is affine, and the operands' order and arguments."""
    slots = [TensorSlot(i, tuple(spec.shape), dtype) for i, (spec, dtype) in enumerate(zip(call.specs, call.dtypes))]
    args, kwargs = call.arguments(slots, {})
    order = tuple(slot.number for slot in operands_of(args, kwargs, TensorSlot))
    whole, affine = _described(rule, (args, kwargs))
    if whole is not None and (sorted(order) != list(range(len(slots))) or len(whole.ins) != len(order)):
        whole = None
    return whole, affine, order, (args, kwargs)


def _moved(call: _Call, rule: Rule) -> list[ShardTensorSpec] | None:
    """Returns the layouts of all tensors in which each mesh dim with shards or sums cuts a free label; None: no label.

    A mesh dim whose label is free stays. For others a label that results have is taken before one that is summed, and
    one with a position for each rank before others. Where no label is left for a mesh dim, it joins another mesh dim.
    """
    mesh = call.specs[0].mesh
    with no_typecheck():
        whole, affine, order, _ = _labelled(call, rule)
    if whole is None:
        return None
    dims = {number: of_one or () for number, of_one in zip(order, whole.ins)}
    sharded = [number for number in order if call.specs[number].sharded or call.specs[number].partial]
    free = [
        label
        for label in free_labels(whole, affine)
        if all(any(label in dim for dim in dims[number]) for number in sharded)
    ]
    cuts: dict[int, set[Any]] = {}  # mesh dim -> what operands are sharded along
    for number in sharded:
        for m, d in call.specs[number].sharded:
            cuts.setdefault(m, set()).add(_cut_of(call.specs[number], dims[number], whole, m, d))
        for m in call.specs[number].partial:
            cuts.setdefault(m, set()).add(None)
    chosen: dict[int, Cut] = {}
    for m, (cut, *others) in cuts.items():
        used = [other.label for other in chosen.values()]
        if cut is not None and cut.label in free and not others and cut.label not in used:
            chosen[m] = cut
    joining: list[int] = []
    for m in sorted(cuts.keys() - chosen.keys()):
        used = [cut.label for cut in chosen.values()]
        left = [label for label in free if whole.sizes[label] > 1 and label not in used]
        if not left:
            joining.append(m)
            continue
        label = min(left, key=lambda label: (label in whole.reduced, whole.sizes[label] < mesh.shape[m]))
        chosen[m] = Cut(label, chunk_sizes(whole.sizes[label], mesh.shape[m]))
    if joining:
        if not chosen or not can_be_merged(mesh):
            return None
        first = max(chosen, key=lambda m: (chosen[m].label not in whole.reduced, whole.sizes[chosen[m].label]))
        cut = Cut(chosen[first].label, joined_sizes(mesh, first, chosen[first].sizes, joining))
        chosen |= dict.fromkeys((first, *joining), cut)
    return [_along_labels(spec, dims[number], whole, chosen) for number, spec in enumerate(call.specs)]


def _cut_of(spec: ShardTensorSpec, dims: Dims, whole: Spec, mesh_dim: int, dim: int) -> Cut | None:
    """Returns the label along which an operand is sharded, if its shards are shards of it."""
    if not dims or not dims[dim]:
        return None
    label, *inner = dims[dim]
    count = prod(whole.sizes[factor] for factor in inner)
    sizes = spec.sizes[mesh_dim] or ()
    return None if any(size % count for size in sizes) else Cut(label, tuple(size // count for size in sizes))


def _along_labels(spec: ShardTensorSpec, dims: Dims, whole: Spec, chosen: Mapping[int, Cut]) -> ShardTensorSpec:
    """Returns the layout of an operand in which each mesh dim of `chosen` shards the dim that begins with its label."""
    placements, sizes = list(spec.placements), list(spec.sizes)
    for m, cut in chosen.items():
        at = next((d for d, dim in enumerate(dims) if dim and dim[0] == cut.label), None)
        if at is None:
            placements[m], sizes[m] = Replicate(), None
        else:
            inner = prod(whole.sizes[factor] for factor in dims[at][1:])
            placements[m], sizes[m] = Shard(at), tuple(size * inner for size in cut.sizes)
    return make_spec(spec.mesh, placements, spec.shape, sizes)


def _described(rule: Rule, arguments: Arguments) -> tuple[Spec | None, bool]:
    """Returns the label spec of a call (None: unknown, or the call draws random numbers), and True if it is affine."""
    args, kwargs = substituted(arguments, TensorSlot, partial(_on_meta, {}))
    try:
        if rule.random(*args, **kwargs) if callable(rule.random) else rule.random:
            return None, False
        spec = _without_inner_ones(rule.spec(*args, **kwargs)) if rule.spec is not None else None
        return spec, rule.affine is not None and rule.affine(*args, **kwargs)
    except Exception:  # the rule asks for values, or the arguments are not valid
        return None, False


def _without_inner_ones(spec: Spec) -> Spec:
    """Returns a spec without labels of size 1 beside others; a dim of size 1 by itself may be on one rank."""
    every = [dim for dims in (*spec.ins, *spec.outs) for dim in dims or () if len(dim) > 1]
    inner = {label for dim in every for label in dim if spec.sizes[label] == 1}

    def dims(of: Dims | None) -> Any:
        return None if of is None else tuple(tuple(label for label in dim if label not in inner) for dim in of)

    return spec._replace(ins=tuple(map(dims, spec.ins)), outs=tuple(map(dims, spec.outs))) if inner else spec


def _on_meta(shapes: Mapping[int, tuple[int, ...]], slot: TensorSlot) -> torch.Tensor:
    """Returns a tensor without values for a slot, of the shape in `shapes` or else of the slot."""
    return torch.empty(shapes.get(slot.number, slot.shape), dtype=slot.dtype, device="meta")


def _plan_of(
    call: _Call, rule: Rule, arguments: Arguments, order: tuple[int, ...], whole: Spec, cuts: dict[int, Cut]
) -> _ShardCallPlan | None:
    """Returns the plan of this rank; None on all ranks if the shards of some rank have no local call."""
    mesh = call.specs[0].mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a rank outside of the mesh
        return None
    plan: _ShardCallPlan | None = None
    for chosen in itertools.product(*(dict.fromkeys(cut.sizes) for cut in cuts.values())):
        sizes = {cut.label: max(size, 1) for cut, size in zip(cuts.values(), chosen)}
        sizes = {label: size for label, size in sizes.items() if size != whole.sizes[label]}
        lengths = {**whole.sizes, **sizes}
        shapes = {i: _shape(dims, lengths) for i, dims in zip(order, whole.ins) if dims is not None}
        local = local_arguments(call.func, rule, whole, sizes, arguments, partial(_on_meta, shapes))
        if local is None:
            return None
        if chosen == tuple(cut.sizes[coordinate[m]] for m, cut in cuts.items()):
            leaves = zip(pytree.tree_leaves(local), pytree.tree_leaves(arguments), strict=True)
            changed = {i: x for i, (x, given) in enumerate(leaves) if x is not given}
            padded = tuple(torch.Size(shapes.get(i, spec.shape)) for i, spec in enumerate(call.specs))
            means = [
                size / whole.sizes[cut.label]
                for cut, size in zip(cuts.values(), chosen)
                if whole.reduced.get(cut.label) == "mean"
            ]
            results = tuple(_result_spec(mesh, dims, whole, cuts) for dims in whole.outs)
            labels = _labels(order, call, whole, cuts)
            plan = _ShardCallPlan(order, labels, changed, padded if 0 in chosen else None, results, prod(means))
    return plan


def _shape(dims: Dims, lengths: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(prod(lengths[label] for label in dim) for dim in dims)


def _result_spec(mesh: DeviceMesh, dims: Dims, whole: Spec, cuts: dict[int, Cut]) -> ShardTensorSpec:
    """Returns the layout of a result: sharded along each cut label that it has, Partial for the others."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    sizes: list[tuple[int, ...] | None] = [None] * mesh.ndim
    for m, cut in cuts.items():
        placements[m] = Partial()
        for d, (first, *inner) in enumerate(dim or (None,) for dim in dims):
            if first == cut.label:
                count = prod(whole.sizes[label] for label in inner)
                placements[m], sizes[m] = Shard(d), tuple(size * count for size in cut.sizes)
    return make_spec(mesh, placements, _shape(dims, whole.sizes), sizes)


def _labels(order: Sequence[int], call: _Call, whole: Spec, cuts: dict[int, Cut]) -> Labels:
    """Returns labels for `inside`, in which cut labels alone have names, so that all other dims are whole."""
    cut_labels = {cut.label for cut in cuts.values()}
    operands = []
    for number, dims in zip(order, whole.ins):
        names = [dim[0] if dim and dim[0] in cut_labels else None for dim in dims or ()]
        operands.append(tuple(names) if dims is not None else (None,) * len(call.specs[number].shape))
    return Labels(tuple(operands), tuple(sorted(cut_labels)))

"""Functions without a handler, on each rank's shards, where what is sharded is a free label: `on_shards`.

What a function does to dims is told by the rules that the type checker reads (`checking/types/rules`): each dim has
labels, and equal labels are positions that belong together. A label that values neither mix along nor are picked from
is free: the function of a shard of it is the shard of the function. So it may be sharded if it is the outermost label
of a dim of every operand and result that has it, with the same shards. One that ends as a sum, or as a mean, in all
operands makes the result a sum over the ranks, a mean by the global count.

The integers of a call may count positions of the whole (`F.affine_grid(theta, size)`). Which ones do, follows from the
rule: of the local call it has to tell the same as of the whole one with shorter labels. That is asked for the shards of
all ranks, so that all ranks decide alike. A rank with an empty shard asks what the function gives of one position, to
learn the dtype of the result, since many functions take no empty tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..checking.types.rules import RULES, Rule, Spec
from ..checking.types.rules import operands as operands_of
from ..checking.types.rules.normal_form import normal_form, without_ones
from ..spmd import no_typecheck
from .exchange import linked
from .labels import Labels, inside
from .placements import Partial, Placement, Replicate, Shard
from .redistribute import redistributed
from .spec import ShardTensorSpec, gradient_spec, make_spec
from .tensor import ShardTensor, wrap_result

__all__ = ["on_shards"]

_ENDS = ("sum", "mean")  # of a label; what is left on a rank is a summand
_MISSING = object()


class _Slot(NamedTuple):
    """The place of a tensor in the arguments of a call."""

    number: int


class _Call(NamedTuple):
    """A call without its tensors; equal for calls that look alike.

    Attributes:
        leaves: of the arguments; a `_Slot` for a tensor.
        specs, dtypes: of the tensors; the layout of a plain one is Replicate.
    """

    func: Callable[..., Any]
    tree: Any
    leaves: tuple[Any, ...]
    specs: tuple[ShardTensorSpec, ...]
    dtypes: tuple[torch.dtype, ...]

    def with_tensors(self, tensors: Sequence[Any], leaves: Sequence[Any] | None = None) -> tuple[Any, Any]:
        flat = [tensors[x.number] if isinstance(x, _Slot) else x for x in leaves or self.leaves]
        arguments: tuple[Any, Any] = tree_unflatten(flat, self.tree)
        return arguments

    def on_meta(self, shapes: Sequence[Sequence[int]], leaves: Sequence[Any] | None = None) -> tuple[Any, Any]:
        """The arguments with tensors of these shapes, which have no values."""
        return self.with_tensors(
            [torch.empty(tuple(shape), dtype=dtype, device="meta") for shape, dtype in zip(shapes, self.dtypes)], leaves
        )


class _Plan(NamedTuple):
    """How a rank calls a function on its shards.

    Attributes:
        order: the tensors as the rule counts them.
        labels: of their dims, for `inside`.
        counts: the leaves of the arguments that are other integers in this rank's call.
        padded: for each tensor the shape with which the function is called, where one of the shards is empty.
        results: their layouts.
        share: of the result, by which it is a summand of a mean.
    """

    order: tuple[int, ...]
    labels: Labels
    counts: dict[int, int]
    padded: tuple[torch.Size, ...] | None
    results: tuple[ShardTensorSpec, ...]
    share: float


def on_shards(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`func(*args, **kwargs)` by this rank's shards alone; NotImplemented where shards are not independent."""
    rule = RULES.get(func)
    if rule is None or rule.kind != "op" or rule.spec is None or rule.inplace is not None:
        return NotImplemented
    flat, tree = tree_flatten((args, kwargs))
    positions = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
    tensors = [flat[i] for i in positions]
    mesh = next(x._spec.mesh for x in tensors if isinstance(x, ShardTensor))
    specs = tuple(x._spec if isinstance(x, ShardTensor) else make_spec(mesh, None, x.shape) for x in tensors)
    for number, i in enumerate(positions):
        flat[i] = _Slot(number)
    call = _Call(func, tree, tuple(flat), specs, tuple(x.dtype for x in tensors))
    key = "free labels", call, tuple(map(type, flat))  # 2 and 2.0 are equal
    try:
        plan = mesh.plans.get(key, _MISSING)
        if plan is _MISSING:
            plan = mesh.plans[key] = _planned(call, rule)
    except TypeError:  # an argument is not hashable
        plan = _planned(call, rule)
    if plan is None:
        return NotImplemented
    return _called(call, plan, tensors)


def _called(call: _Call, plan: _Plan, tensors: Sequence[torch.Tensor]) -> Any:
    locals_, _ = inside(_as_given, [tensors[number] for number in plan.order], plan.labels)
    own: list[Any] = [None] * len(tensors)
    for number, local in zip(plan.order, locals_):
        own[number] = local
    if plan.padded is None:
        outcome, has_values = _apply(call, own, plan), True
    else:
        outcome, has_values = _of_one_position(call, own, plan)
    results, tree = tree_flatten(outcome)
    specs = iter(plan.results)
    for i, y in enumerate(results):
        if not isinstance(y, torch.Tensor):
            continue
        spec = next(specs)
        if not has_values:
            nothing = torch.zeros(spec.local_shape, dtype=y.dtype, device=own[0].device)
            y = linked(nothing, *own) if y.requires_grad else nothing
        assert y.shape == spec.local_shape, f"the rule of {call.func} tells {spec.local_shape}, it gave {y.shape}"
        y = y * plan.share if plan.share != 1 else y
        results[i] = wrap_result(redistributed(y, spec, gradient_spec(spec)), gradient_spec(spec), tensors)
    return tree_unflatten(results, tree)


def _apply(call: _Call, tensors: Sequence[Any], plan: _Plan) -> Any:
    args, kwargs = call.with_tensors(tensors, [plan.counts.get(i, x) for i, x in enumerate(call.leaves)])
    return call.func(*args, **kwargs)


def _of_one_position(call: _Call, own: Sequence[Any], plan: _Plan) -> tuple[Any, bool]:
    """What a rank with an empty shard would give of one position: without values, or of ones where it needs some.

    A view of an operand is one of its own, which the flag tells: what is written into it enters the operand's graph.
    """
    assert plan.padded is not None

    def of(device: str | torch.device) -> tuple[Any, bool]:
        tensors = []
        for x, shape in zip(own, plan.padded or ()):
            number = 1 if x.is_floating_point() or x.is_complex() else 0  # an index
            tensors.append(torch.full(shape, number, dtype=x.dtype, device=device).requires_grad_(x.requires_grad))
        result = _apply(call, tensors, plan)
        viewed = any(
            isinstance(y, torch.Tensor) and any(y._base is x for x in tensors) for y in tree_flatten(result)[0]
        )
        return (_apply(call, own, plan), True) if viewed else (result, False)

    device = own[0].device
    # Autocast does not see what has no values, and many functions of ones have no result (the inverse of a matrix).
    first, second = (device, "meta") if torch.is_autocast_enabled(device.type) else ("meta", device)
    with no_typecheck():
        try:
            return of(first)
        except RuntimeError:  # there is no such call, or no such result
            return of(second)


def _as_given(*arguments: Any) -> Labels:
    labels: Labels = arguments[-1]
    return labels


# --- planning


def _planned(call: _Call, rule: Rule) -> _Plan | None:
    """None: a shard is not independent, or nobody knows."""
    args, kwargs = call.with_tensors([_Slot(number) for number in range(len(call.specs))])
    order = tuple(slot.number for slot in operands_of(args, kwargs, of=_Slot))
    whole = _told(call, rule, [spec.shape for spec in call.specs], call.leaves)
    if whole is None or sorted(order) != list(range(len(call.specs))) or len(whole.ins) != len(order):
        return None
    cuts = _cuts(call, order, whole, rule)
    results = _results(call, whole, cuts) if cuts else None
    if not cuts or results is None:
        return None
    leaves: tuple[Any, ...] | None = None
    padded, share = None, 1.0
    coordinate = call.specs[0].mesh.get_coordinate()
    for chosen in itertools.product(*(range(len(cut.sizes)) for cut in cuts.values())):
        sizes = {cut.label: cut.sizes[index] for cut, index in zip(cuts.values(), chosen)}
        found = _local(call, rule, order, whole, {label: max(size, 1) for label, size in sizes.items()})
        if found is None:
            return None
        if coordinate is not None and chosen == tuple(coordinate[m] for m in cuts):
            leaves, shapes = found
            if 0 in sizes.values():
                padded = tuple(torch.Size(shape) for shape in shapes)
            for label, size in sizes.items():
                if whole.reduced.get(label) == "mean":
                    share *= size / whole.sizes[label]
    if leaves is None:  # a rank outside of the mesh
        return None
    labels = _labels(order, call, whole, cuts)
    counts = {i: x for i, (x, given) in enumerate(zip(leaves, call.leaves)) if x is not given}
    return _Plan(order, labels, counts, padded, results, share)


def _told(call: _Call, rule: Rule, shapes: Sequence[Sequence[int]], leaves: Sequence[Any]) -> Spec | None:
    """What the rule tells of a call, without labels of size 1, along which nothing can be cut."""
    args, kwargs = call.on_meta(shapes, leaves)
    try:
        draws = rule.random(*args, **kwargs) if callable(rule.random) else rule.random
        if draws or rule.spec is None:
            return None
        return without_ones(rule.spec(*args, **kwargs))
    except Exception:  # it asks for values, or the call is not one of this function
        return None


class _Cut(NamedTuple):
    """A label that a mesh dim shards, in shards of these sizes."""

    label: int
    sizes: tuple[int, ...]


def _cuts(call: _Call, order: Sequence[int], whole: Spec, rule: Rule) -> dict[int, _Cut] | None:
    """What each mesh dim shards; None: not of one free label, or not all operands alike."""
    cuts: dict[int, _Cut] = {}
    for number, dims in zip(order, whole.ins):
        for m, dim in call.specs[number].sharded:
            if dims is None or not dims[dim]:
                return None
            label, *inner = dims[dim]
            count = prod(whole.sizes[each] for each in inner)
            sizes = call.specs[number].sizes[m] or ()
            if any(size % count for size in sizes):
                return None
            cut = _Cut(label, tuple(size // count for size in sizes))
            if cuts.setdefault(m, cut) != cut:
                return None
    labels = [cut.label for cut in cuts.values()]
    if len(set(labels)) != len(labels) or not all(_is_free(label, whole, rule, call) for label in labels):
        return None
    return cuts


def _is_free(label: int, whole: Spec, rule: Rule, call: _Call) -> bool:
    if label in whole.fixed or label in whole.weak or label in whole.ranges or label in whole.looked_up:
        return False
    for dims in whole.ins:  # the outermost label of one dim of each operand that has it
        having = [dim for dim in dims or () if label in dim]
        if len(having) > 1 or any(dim[0] != label for dim in having):
            return False
    if label not in whole.reduced:
        return all(len([dim for dim in dims if label in dim]) == 1 for dims in whole.outs)
    in_all = all(dims is not None and any(label in dim for dim in dims) for dims in whole.ins)
    args, kwargs = call.on_meta([spec.shape for spec in call.specs])
    affine = rule.affine is not None and rule.affine(*args, **kwargs)
    ended = all(label not in dim for dims in whole.outs for dim in dims)
    return whole.reduced[label] in _ENDS and in_all and ended and not affine


def _results(call: _Call, whole: Spec, cuts: dict[int, _Cut]) -> tuple[ShardTensorSpec, ...] | None:
    mesh = call.specs[0].mesh
    results = []
    for dims in whole.outs:
        placements: list[Placement] = [Replicate()] * mesh.ndim
        sizes: list[tuple[int, ...] | None] = [None] * mesh.ndim
        for m, cut in cuts.items():
            having = [d for d, dim in enumerate(dims) if cut.label in dim]
            if not having:
                placements[m] = Partial()
                continue
            (d,) = having
            if dims[d][0] != cut.label:
                return None
            inner = prod(whole.sizes[each] for each in dims[d][1:])
            placements[m], sizes[m] = Shard(d), tuple(size * inner for size in cut.sizes)
        shape = [prod(whole.sizes[each] for each in dim) for dim in dims]
        sharded = [each.dim for each in placements if isinstance(each, Shard)]
        if len(set(sharded)) != len(sharded):
            return None
        results.append(make_spec(mesh, placements, shape, sizes))
    return tuple(results)


def _labels(order: Sequence[int], call: _Call, whole: Spec, cuts: dict[int, _Cut]) -> Labels:
    """For `inside`: only what is cut has labels that operands share; all else is whole."""
    cut = {each.label for each in cuts.values()}
    operands = []
    for number, dims in zip(order, whole.ins):
        names = [dim[0] if dim and dim[0] in cut else None for dim in dims or ()]
        operands.append(tuple(names) if dims is not None else (None,) * len(call.specs[number].shape))
    return Labels(tuple(operands), tuple(sorted(cut)))


# --- the call of one rank


def _local(
    call: _Call, rule: Rule, order: Sequence[int], whole: Spec, sizes: dict[int, int]
) -> tuple[tuple[Any, ...], list[list[int]]] | None:
    """The arguments of a rank whose labels have these sizes, and the shapes of its tensors."""
    shapes = [list(spec.shape) for spec in call.specs]
    for number, dims in zip(order, whole.ins):
        for d, dim in enumerate(dims or ()):
            if dim and dim[0] in sizes:
                shapes[number][d] = shapes[number][d] // whole.sizes[dim[0]] * sizes[dim[0]]
    cut = {**whole.sizes, **sizes}
    wanted = normal_form(whole, cut)
    results = [tuple(prod(cut[label] for label in dim) for dim in dims) for dims in whole.outs]
    for leaves in _edited(call.leaves, [(whole.sizes[label], size) for label, size in sizes.items()]):
        told = _told(call, rule, shapes, leaves)
        if told is not None and normal_form(told) == wanted and _gives(call, shapes, leaves, results):
            return leaves, shapes
    return None


def _edited(leaves: tuple[Any, ...], cuts: Sequence[tuple[int, int]]) -> Iterator[tuple[Any, ...]]:
    """The leaves, and those in which one integer for each cut counts the positions of the shard."""
    yield leaves
    places = [[i for i, x in enumerate(leaves) if type(x) is int and x and x % whole == 0] for whole, _ in cuts]
    for chosen in itertools.product(*([None, *each] for each in places)):
        edited = list(leaves)
        for i, (whole, size) in zip(chosen, cuts):
            if i is not None:
                edited[i] = edited[i] // whole * size
        if any(i is not None for i in chosen):
            yield tuple(edited)


def _gives(
    call: _Call, shapes: Sequence[Sequence[int]], leaves: Sequence[Any], results: Sequence[tuple[int, ...]]
) -> bool:
    """Whether the results of a call without values have these shapes; or nobody knows, for there is no such call."""
    args, kwargs = call.on_meta(shapes, leaves)
    try:
        with no_typecheck():
            flat, _ = tree_flatten(call.func(*args, **kwargs))
    except NotImplementedError:
        return True
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    return [tuple(x.shape) for x in flat if isinstance(x, torch.Tensor)] == list(results)

"""Derivation of a call's strategies from typing rules: the types that its operands may have, and why not others.

Candidates follow from the label spec of the global call: everything R; everything I; each label that is not fixed, cut
on every operand that has it; and P through each group of operands in which the call is linear. A candidate is a
strategy if the checker's `judge` accepts it without an assumption and it has a local call (`rules/local_call.py`).

Correct gradients follow from the types: the gradient of R is P, of P is R, of I is I, of S is S. So an I value (a
parameter) that a call takes as R is converted, and the backward of that conversion sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...checking.types.judge import Judgement, Operand, judge
from ...mesh import part_of, rest_of
from ...program.program import OuterCall, local_shape
from ...rules import Rule, Spec
from ...rules.containers import substituted
from ...rules.local_call import Arguments, TensorSlot, local_arguments, spec_of
from ...spmd.errors import Violation
from ...spmd.tensor_type import TensorType
from ...spmd.types import I, P, R, Shard, SpmdType
from .composite_strategies import DRAWING, EXPERTS, TOKENS, Template, composite_of, expert_composites
from .conversions import RowsOfExperts
from .whole_tables import Places, table_strategy

__all__ = [
    "Derivation",
    "Facts",
    "Refusal",
    "assignments",
    "cut_types",
    "described",
    "derive",
    "results_of",
    "types_without_rule",
    "rejection_reason",
]


class Refusal(NamedTuple):
    """A rejected candidate, and the reason in words."""

    name: str
    why: str


class Derivation(NamedTuple):
    """All strategies of a call, "R" first, and the rejected candidates."""

    templates: list[Template]
    refusals: list[Refusal]


class Facts(NamedTuple):
    """Properties of a call that determine its strategies; calls with equal facts have equal strategies."""

    function: Callable[..., Any]
    rule: Rule | None
    arguments: Arguments  # with slots
    slots: tuple[TensorSlot, ...]  # the operands, in the order of the rules
    results: tuple[tuple[int, ...], ...]  # shapes
    dtypes: tuple[torch.dtype, ...]  # of the results
    written: tuple[int, ...]
    varies: bool
    random: bool
    axis: str
    size: int
    strides: tuple[int, ...]
    routed: bool = False  # it reads rows of experts
    places: Places | None = None  # of its embedding tables, if they are whole on ranks
    outer: tuple[OuterCall, ...] = ()  # its types on the axes before
    # the call that a composite replaces, and the number of the axis that has the composite
    original: tuple[Callable[..., Any], Arguments, int] | None = None


def derive(facts: Facts) -> Derivation:
    """Derives all strategies of a call, "R" first."""
    derivation = Derivation([], [])
    spec, affine, why = described(facts)
    judged = _with_dims_of_one(facts) if spec is not None and facts.outer else spec
    for name, types, label in assignments(facts, spec):
        if why and name not in ("R", "I"):
            continue
        results = results_of(facts, judged, affine, types) if judged is not None else types_without_rule(facts, types)
        reason = results if isinstance(results, str) else rejection_reason(facts, types, results)
        arguments = None
        if not reason and label is not None:
            assert spec is not None and not isinstance(results, str)
            arguments = _local(facts, spec, label, types)
            if arguments is None:
                reason = "no choice of the call's integers makes it the call of a shard"
            elif not _checker_agrees(facts, arguments, affine, types, results):
                reason = "the checker cannot tell which of the dims of size 1 is sharded"
        if reason:
            derivation.refusals.append(Refusal(name, reason))
        else:
            assert not isinstance(results, str)
            template = Template(name, types, results, arguments, share=_share(facts, spec, label))
            derivation.templates.append(with_rank_mask(facts, template))
    if facts.varies:
        derivation.templates.extend(
            _composites(facts, spec) if spec is not None else _strategies_of_like_constructors(facts)
        )
        derivation.templates.extend(_over_experts(facts, derivation.templates))
    if facts.places is not None:
        args = facts.function, facts.arguments, facts.slots, facts.places, facts.axis, facts.size
        derivation.templates.append(table_strategy(*args))
    if why:
        derivation.refusals.append(Refusal("S", why))
    return derivation


def described(facts: Facts) -> tuple[Spec | None, bool, str]:
    """Returns `(spec, affine, reason why there is no spec)`."""
    rule = facts.rule
    if rule is None:
        return None, False, "the function has no rule: describe it by register_op(annotation)"
    if rule.kind != "op" or rule.spec is None:
        return None, False, f"its rule says nothing about the dims of its results ({rule.kind})"
    if any(0 in shape for shape in (*(slot.shape for slot in facts.slots), *facts.results)):
        return None, False, "it has an empty tensor"
    args, kwargs = substituted(facts.arguments, TensorSlot, whole_tensor)
    try:
        spec = spec_of(rule, (args, kwargs))
        affine = rule.affine is not None and bool(rule.affine(*args, **kwargs))
    except Exception as error:  # the rule reads values, which are not known before the program runs
        return None, False, f"its rule asks for the values of its arguments ({type(error).__name__}: {error})"
    if len(spec.ins) != len(facts.slots) or len(spec.outs) != len(facts.results):
        return None, False, (
            f"its rule speaks of {len(spec.ins)} operands and {len(spec.outs)} results, and there are "
            f"{len(facts.slots)} and {len(facts.results)}"
        )  # fmt: skip
    return spec, affine, ""


def _with_dims_of_one(facts: Facts) -> Spec:
    """Returns the spec with factors of size 1: an axis before may leave one position of a dim that it cuts."""
    assert facts.rule is not None and facts.rule.spec is not None
    args, kwargs = substituted(facts.arguments, TensorSlot, whole_tensor)
    spec: Spec = facts.rule.spec(*args, **kwargs)
    return spec


@lru_cache(4096)
def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def whole_tensor(slot: TensorSlot) -> torch.Tensor:
    return _meta(slot.shape, slot.dtype)


def assignments(facts: Facts, spec: Spec | None) -> Iterator[tuple[str, tuple[SpmdType, ...], int | None]]:
    """Yields candidates for a strategy: `(name, types of the operands, label that is cut)`."""
    count = len(facts.slots)
    yield "R", (R,) * count, None
    if any(slot.differentiable for slot in facts.slots):
        yield "I", tuple(I if slot.differentiable else R for slot in facts.slots), None
    if spec is None or not facts.varies:
        return
    assert facts.rule is not None
    for group in _groups(facts.rule, count):
        if group and not any(facts.slots[index].dtype is torch.bool for index in group):
            name = f"P of {', '.join(map(str, group))}"
            yield name, tuple(P if index in group else R for index in range(count)), None
    for label, length in spec.sizes.items():
        if label in spec.fixed:
            continue
        for stride in dict.fromkeys((1, *facts.strides)):
            if length % (stride * facts.size) == 0 and length:
                yield from cut_types(facts, spec, label, stride)


def _any_type(slot: TensorSlot, size: int) -> Iterator[SpmdType]:
    """Yields the types except R that an operand may have if only its shape or dtype is read."""
    if slot.differentiable:
        yield I
    yield P
    yield from (Shard(dim) for dim, length in enumerate(slot.shape) if length and length % size == 0)


def _strategies_of_like_constructors(facts: Facts) -> Iterator[Template]:
    """Yields the strategies of functions that read only an operand's shape (`zeros_like`) or dtype.

    Their results are equal on all ranks, so that a rank may compute the positions of its shard only.
    """
    rule = facts.rule
    if rule is None or rule.kind not in ("zero", "uniform") or len(facts.slots) != 1 or len(facts.results) != 1:
        return
    for spmd_type in _any_type(facts.slots[0], facts.size):
        like = isinstance(spmd_type, Shard) and _follows_operand(facts, rule, spmd_type)
        yield Template(f"{spmd_type} of operand 0", (spmd_type,), (spmd_type if like else R,), None)


def _follows_operand(facts: Facts, rule: Rule, shard: Shard) -> bool:
    """Returns whether the result has the operand's shape, globally and for a shard: `zeros_like`, not `new_full`."""
    if rule.spec is None or facts.results[0] != facts.slots[0].shape:
        return False
    args, kwargs = substituted(facts.arguments, TensorSlot, _local_tensor(facts, (shard,)))
    spec: Spec = rule.spec(*args, **kwargs)
    local = tuple(prod(spec.sizes[label] for label in dim) for dim in spec.outs[0])
    return local == local_shape(facts.slots[0].shape, shard, facts.size)


def _groups(rule: Rule, count: int) -> list[tuple[int, ...]]:
    """Returns the groups of operands in which the call is jointly linear."""
    groups = [range(count) if group == (-1,) else group for group in rule.linear]
    return list(dict.fromkeys(tuple(index for index in group if index < count) for group in groups))


def cut_types(
    facts: Facts, spec: Spec, label: int, stride: int
) -> Iterator[tuple[str, tuple[SpmdType, ...], int | None]]:
    """Yields candidates that cut a label on every operand that has it; other operands are R, or P if added to a sum."""
    shards = {index: cuts(dims, spec, label, stride) for index, dims in enumerate(spec.ins) if dims is not None}
    shards = {index: shard for index, shard in shards.items() if shard is not None}
    if not shards:
        return
    first = min(shards)
    base: list[SpmdType] = [shards.get(index) or R for index in range(len(facts.slots))]
    name = f"{base[first]} of operand {first}"
    for index, dims in enumerate(spec.ins):
        if dims is None:  # only its shape or dtype is read: any type with the right local shape
            for spmd_type in _any_type(facts.slots[index], facts.size):
                types = (*base[:index], spmd_type, *base[index + 1 :])
                yield f"{name}, {spmd_type} of operand {index}", types, label
    yield name, tuple(base), label
    if label not in spec.reduced:
        return
    assert facts.rule is not None
    added = set()
    for group in _groups(facts.rule, len(facts.slots)):
        if shards.keys() & set(group):
            added.add(tuple(index for index in group if index not in shards))
    for group in sorted(filter(None, added)):
        types = tuple(P if index in group else spmd_type for index, spmd_type in enumerate(base))
        yield f"{name}, P of {', '.join(map(str, group))}", types, label


def cuts(dims: Any, spec: Spec, label: int, stride: int = 1) -> Shard | None:
    """Returns the type of a tensor of `dims` whose label is cut in `stride` blocks; None if it lacks the label."""
    for dim, factors in enumerate(dims):
        if label in factors:
            outer = prod(spec.sizes[factor] for factor in factors[: factors.index(label)])
            return Shard(dim, outer * stride)
    return None


def results_of(facts: Facts, spec: Spec, affine: bool, types: Sequence[SpmdType]) -> tuple[SpmdType, ...] | str:
    """Returns the types of the results, or the reason why the operands' types are not allowed."""
    before = [{on.axis: _plain(on.operands[index]) for on in facts.outer} for index in range(len(types))]
    judged = [
        Operand(TensorType.of({**known, facts.axis: spmd_type}, R), slot.differentiable)
        for known, spmd_type, slot in zip(before, types, facts.slots, strict=True)
    ]
    assert facts.rule is not None
    try:
        judgement: Judgement = judge(facts.rule, spec, judged, affine, len(spec.outs))
    except Violation as violation:
        return violation.why
    if judgement.assumed:
        return f"its types would rest on an assumption: {judgement.assumed[0]}"
    for on in facts.outer:
        for spmd_type, type_ in zip(on.results, judgement.types, strict=True):
            if _plain(type_.get(on.axis) or R) != _plain(spmd_type):
                return f"on {on.axis} its result would become {type_.get(on.axis)} instead of {spmd_type}"
    return tuple(_plain(type_.get(facts.axis) or R) for type_ in judgement.types)


def _plain(spmd_type: SpmdType) -> SpmdType:
    """Returns a type as programs have it: R for constants, shards without the history of their merges."""
    if isinstance(spmd_type, Shard):
        return Shard(spmd_type.dim, spmd_type.stride, part=spmd_type.part, scale=spmd_type.scale)
    return R if spmd_type.letter in "R0" and not spmd_type.scale else spmd_type


def types_without_rule(facts: Facts, types: Sequence[SpmdType]) -> tuple[SpmdType, ...]:
    """Result types of a function without a rule: equal on all ranks, since its operands are."""
    return (I if I in types else R,) * len(facts.results)


def rejection_reason(facts: Facts, types: Sequence[SpmdType], results: Sequence[SpmdType]) -> str:
    """Returns the reason why a legal call is no strategy; "" if it is one."""
    for spmd_type in results:
        if isinstance(spmd_type, Shard):
            if spmd_type.part is not None or spmd_type.scale:
                return f"its result is {spmd_type}, which no conversion makes whole"
        elif spmd_type not in (R, I, P, P("avg")):
            return f"its result is {spmd_type}, which no conversion makes whole"
    shapes = [*(slot.shape for slot in facts.slots), *facts.results]
    for spmd_type, shape in zip((*types, *results), shapes):
        if isinstance(spmd_type, Shard) and shape[spmd_type.dim] % (spmd_type.stride * facts.size):
            return f"{spmd_type} of {list(shape)} does not divide by {facts.size} ranks"
    for index in facts.written:
        if types[index] is not R:
            return f"operand {index} is written in place, so it cannot be sharded"
    cut = any(isinstance(spmd_type, Shard) for spmd_type in types)
    if facts.random and cut and facts.function not in DRAWING:
        return "it would draw the same random numbers on every rank"
    return ""


def _share(facts: Facts, spec: Spec | None, label: int | None) -> float | None:
    """Returns the fraction of the computation that a rank does, None: 1 / size.

    If the features of an attention's values are cut, each rank computes all scores.
    """
    if spec is None or facts.function is not F.scaled_dot_product_attention or spec.ins[2] is None:
        return None
    if label is None or label not in spec.ins[2][-1]:
        return None
    width, values = facts.slots[0].shape[-1], facts.slots[2].shape[-1]
    return (width + values / facts.size) / (width + values)


def _local_tensor(facts: Facts, types: Sequence[SpmdType]) -> Callable[[TensorSlot], torch.Tensor]:
    types_of = dict(zip(facts.slots, types))
    return lambda slot: _meta(local_shape(slot.shape, types_of.get(slot, R), facts.size), slot.dtype)


def _checker_agrees(
    facts: Facts, arguments: Arguments, affine: bool, types: Sequence[SpmdType], results: Sequence[SpmdType]
) -> bool:
    """Returns whether the checker, which sees local sizes only, infers the same types."""
    assert facts.rule is not None and facts.rule.spec is not None
    args, kwargs = substituted(arguments, TensorSlot, _local_tensor(facts, types))
    return results_of(facts, facts.rule.spec(*args, **kwargs), affine, types) == tuple(results)


def with_rank_mask(facts: Facts, template: Template) -> Template:
    """Returns the template with a function that draws different random numbers on each rank of the axis only."""
    if not facts.random or template.arguments is None:
        return template
    args, kwargs = template.arguments
    if not part_of(facts.axis).is_whole:
        kwargs = {**kwargs, "shared_axis": rest_of(facts.axis)}
    return template._replace(function=DRAWING[facts.function], arguments=(args, kwargs))


def _composites(facts: Facts, spec: Spec) -> Iterator[Template]:
    """Yields the strategies by composites: labels are cut of which the function needs all positions."""
    for label, length in spec.sizes.items():
        if length % facts.size or length == facts.size:  # a dim of size 1 looks like a new dim, and has no factors
            continue
        composite = composite_of(facts.function, facts.arguments, spec, label, facts.axis)
        if composite is None:
            continue
        labels = [label] if composite.also is None else [composite.also, label]
        shards = [_first_cut(dims or (), spec, labels) for dims in spec.ins]
        types = tuple(shard if shard and i not in composite.whole else R for i, shard in enumerate(shards))
        results = tuple(_first_cut(dims, spec, labels) or composite.ended for dims in spec.outs)
        if not rejection_reason(facts, types, results):
            itemsize = max(4, facts.slots[0].dtype.itemsize)
            forward, backward = (2 * n * itemsize * (facts.size - 1) // facts.size for n in composite.reduced)
            forward += composite.gathered * itemsize * (facts.size - 1)
            sent = composite.ring // facts.size * (facts.size - 1)  # keys and values; in backward their gradients too
            forward += sent * facts.dtypes[0].itemsize  # autocast's
            backward += sent * (facts.dtypes[0].itemsize + max(4, facts.dtypes[0].itemsize))
            first = next(index for index, spmd_type in enumerate(types) if spmd_type is not R)
            name = f"{composite.function.__name__} of {types[first]} of operand {first}"
            how = composite.arguments, composite.function, (forward, backward)
            steps = facts.size - 1 if composite.ring else 0
            share = (2 - 1 / facts.size) / facts.size if composite.causal else None
            yield Template(name, types, results, *how, steps, share)


def _first_cut(dims: Any, spec: Spec, labels: Sequence[int]) -> Shard | None:
    """Returns the type of a tensor that is cut along the first of these labels that it has."""
    return next((shard for shard in (cuts(dims, spec, label) for label in labels) if shard is not None), None)


def _over_experts(facts: Facts, templates: Sequence[Template]) -> list[Template]:
    """Returns the strategies that cut rows between experts: those of `to_experts` and what its rows go through.

    A call of which any equal pieces of dim 0 are computed alone, with the same integers, computes other pieces too.
    """
    if facts.function in EXPERTS:
        args = facts.function, facts.arguments, facts.slots, facts.axis, facts.size
        return [*expert_composites(*args)]
    routed: list[Template] = []
    for template in templates if facts.routed and not facts.random else ():
        shards = {x for x in (*template.operands, *template.results) if isinstance(x, Shard)}
        cut = shards == {Shard(0)} and all(isinstance(x, Shard) for x in template.results)
        if cut and template.arguments in (None, facts.arguments) and template.function is None:
            for exchanged, words in TOKENS.items():
                rows = RowsOfExperts(0, exchanged=exchanged)
                operands, results = (
                    tuple(rows if isinstance(x, Shard) else x for x in types)
                    for types in (template.operands, template.results)
                )
                routed.append(Template(f"experts, {words}", operands, results, template.arguments))
    return routed


def _local(facts: Facts, spec: Spec, label: int, types: Sequence[SpmdType]) -> Arguments | None:
    """Returns the arguments of the local call, with slots; None if no change of its integers is right."""
    assert facts.rule is not None
    sizes = {label: spec.sizes[label] // facts.size}
    return local_arguments(facts.function, facts.rule, spec, sizes, facts.arguments, _local_tensor(facts, types))

"""The strategies over a second axis of what only a program that is divided over a first one has.

Most of its calls are functions of torch with local integers, which have theirs as any call does (`derivation.py`).
Conversions of the first axis, and composites that it asks for, have those of this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..checking.types.rules import RULES, Spec, operands
from ..spmd.types import I, P, R, Shard, SpmdType
from .composite_strategies import DRAWING
from .composites import group_norm
from .congruence import Slot
from .conversions import OPERATORS
from .derivation import (
    Derivation,
    Facts,
    Template,
    assignments,
    cut_types,
    cuts,
    derive,
    described,
    results_of,
    unjudged,
    unwanted,
)

__all__ = ["derive_second"]


def derive_second(facts: Facts) -> Derivation:
    """All strategies of a call of a rank's program, "R" first."""
    if facts.function in OPERATORS.values():
        return Derivation(list(_passed_on(facts)), [])
    if facts.original is not None:
        return Derivation(list(_of_composite(facts)), [])
    return derive(facts)


def _passed_on(facts: Facts) -> Iterator[Template]:
    """The strategies of a conversion on the first axis: a value keeps its type on the second.

    But a dim that it cuts, gathers or exchanges is not cut on the second: the first axis has the outer part of it.
    """
    (slot,) = facts.slots
    options = facts.arguments[1]
    touched = {spmd_type.dim for spmd_type in (options["src"], options["dst"]) if isinstance(spmd_type, Shard)}
    types: list[SpmdType] = [R]
    if facts.varies:
        types += [I] if slot.differentiable else []
        types += [P] if slot.dtype.is_floating_point or slot.dtype.is_complex else []
        for dim, length in enumerate(slot.shape):
            if dim not in touched and length:
                strides = (stride for stride in (1, *facts.strides) if length % (stride * facts.size) == 0)
                types += [Shard(dim, stride) for stride in dict.fromkeys(strides)]
    for spmd_type in types:
        name = str(spmd_type) if spmd_type in (R, I) else f"{spmd_type} of operand 0"
        yield Template(name, (spmd_type,), (spmd_type,), None)


def _of_composite(facts: Facts) -> Iterator[Template]:
    """The strategies of a composite: whole, or another label of its function cut than the first axis cuts.

    The labels are those of the whole call of that function, the first axis' own with its local length.
    """
    assert facts.original is not None and facts.outer is not None
    for name, types, _ in assignments(facts, None):
        yield Template(name, types, unjudged(facts, types), None)
    function, arguments = facts.original
    slots = tuple(operands(*arguments, Slot))
    rule = RULES.get(function)
    spec, affine, _ = described(facts._replace(function=function, rule=rule, arguments=arguments, slots=slots))
    # Groups are an argument, which would have to be divided.
    if spec is None or not facts.varies or facts.function is group_norm or len(slots) != len(facts.slots):
        return
    own = _label_of(spec, facts.outer.operands)
    lengths = [(a, b) for slot, local in zip(slots, facts.slots) for a, b in zip(slot.shape, local.shape) if a != b]
    if own is None or not lengths:
        return
    spec = spec._replace(sizes={**spec.sizes, own: spec.sizes[own] * lengths[0][1] // lengths[0][0]})
    draws = facts.function in DRAWING.values()
    for label, length in spec.sizes.items():
        if label in spec.fixed or not length or (label == own and not draws):
            continue
        for stride in dict.fromkeys((1, *facts.strides)):
            if length % (stride * facts.size) == 0:
                original = facts._replace(function=function, rule=rule, outer=None)
                yield from _with_label_cut(original, spec, affine, label, stride)


def _with_label_cut(facts: Facts, spec: Spec, affine: bool, label: int, stride: int) -> Iterator[Template]:
    args, kwargs = facts.arguments
    own_mask = args, {name: value for name, value in kwargs.items() if name != "alike"}
    for name, types, _ in cut_types(facts, spec, label, stride):
        results = results_of(facts, spec, affine, types)
        if not isinstance(results, str) and not unwanted(facts, types, results):
            yield Template(name, types, results, own_mask if "alike" in kwargs else None)


def _label_of(spec: Spec, types: Sequence[SpmdType]) -> int | None:
    """The label that an axis cuts where operands have these types on it."""
    for dims, spmd_type in zip(spec.ins, types):
        for label in spec.sizes if isinstance(spmd_type, Shard) else ():
            if cuts(dims or (), spec, label, 1) == spmd_type:
                return label
    return None

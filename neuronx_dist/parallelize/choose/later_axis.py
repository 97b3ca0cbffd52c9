"""Strategies over a later axis for the calls that only a local program has.

Most calls of a local program are functions of torch with local integers, whose strategies are derived as for any call
(`derivation.py`). This module has those of the other calls: conversions of the axes before, and their composites.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...mesh import rest_of
from ...rules import RULES, Spec, operands
from ...rules.local_call import Arguments, TensorSlot
from ...spmd.types import I, P, R, Shard, SpmdType
from ..composites import group_norm
from .composite_strategies import DRAWING, Template
from .conversions import OPERATORS
from .derivation import (
    Derivation,
    Facts,
    assignments,
    cut_types,
    cuts,
    derive,
    described,
    rejection_reason,
    results_of,
    types_without_rule,
)

__all__ = ["derive_later"]


def derive_later(facts: Facts) -> Derivation:
    """Derives all strategies of a call of a local program, "R" first."""
    if facts.function in OPERATORS.values():
        return Derivation(list(_passed_on(facts)), [])
    if facts.original is not None:
        return Derivation(list(_of_composite(facts)), [])
    return derive(facts)


def _passed_on(facts: Facts) -> Iterator[Template]:
    """Yields the strategies of a conversion on an axis before, which does not change the type on this axis.

    A dim that it cuts, gathers or exchanges cannot be cut on this axis: the axis before has its outer part.
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
    """Yields the strategies of a composite: not cut, or a label cut that no axis since the composite's cuts.

    Labels are those of the call that the composite replaces; labels that axes cut have their local lengths.
    """
    assert facts.original is not None
    for name, types, _ in assignments(facts, None):
        yield Template(name, types, types_without_rule(facts, types), None)
    function, arguments, number = facts.original
    slots = tuple(operands(*arguments, TensorSlot))
    rule = RULES.get(function)
    spec, affine, _ = described(facts._replace(function=function, rule=rule, arguments=arguments, slots=slots))
    # The number of groups is an argument of group_norm, which would have to be divided.
    if spec is None or not facts.varies or facts.function is group_norm or len(slots) != len(facts.slots):
        return
    if all(slot.shape == local.shape for slot, local in zip(slots, facts.slots)):
        return
    cut = set()
    for before in facts.outer[number:]:
        label_before = _label_of(spec, before.operands)
        if label_before is not None:
            cut.add(label_before)
            spec = spec._replace(sizes={**spec.sizes, label_before: spec.sizes[label_before] // before.size})
        elif any(isinstance(spmd_type, Shard) for spmd_type in before.operands):
            return
    draws = facts.function in DRAWING.values()
    for label, length in spec.sizes.items() if cut else ():
        if label in spec.fixed or not length or (label in cut and not draws):
            continue
        for stride in dict.fromkeys((1, *facts.strides)):
            if length % (stride * facts.size) == 0:
                original = facts._replace(function=function, rule=rule, outer=())
                yield from _with_label_cut(original, spec, affine, label, stride)


def _with_label_cut(facts: Facts, spec: Spec, affine: bool, label: int, stride: int) -> Iterator[Template]:
    arguments = _with_other_numbers(facts)
    for name, types, _ in cut_types(facts, spec, label, stride):
        results = results_of(facts, spec, affine, types)
        if not isinstance(results, str) and not rejection_reason(facts, types, results):
            yield Template(name, types, results, arguments)


def _with_other_numbers(facts: Facts) -> Arguments | None:
    """Returns the arguments by which the ranks of this axis draw different random numbers; None: those of the call."""
    args, kwargs = facts.arguments
    if "shared_axis" not in kwargs:
        return None
    shared = kwargs["shared_axis"]
    others = rest_of(*((shared,) if isinstance(shared, str) else shared))
    still_shared = rest_of(*((others,) if isinstance(others, str) else others), facts.axis)
    rest = {name: value for name, value in kwargs.items() if name != "shared_axis"}
    return args, {**rest, "shared_axis": still_shared} if still_shared else rest


def _label_of(spec: Spec, types: Sequence[SpmdType]) -> int | None:
    """Returns the label that an axis cuts, from the operands' types on it; None if it cuts none."""
    for dims, spmd_type in zip(spec.ins, types):
        for label in spec.sizes if isinstance(spmd_type, Shard) else ():
            if cuts(dims or (), spec, label, 1) == spmd_type:
                return label
    return None

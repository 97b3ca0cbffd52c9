"""The scale of a call's results on one axis, from the scales of its operands.

A scale k says that the ranks hold N^k times a value, N being the size of the axis (`spmd/types.py`). It comes from a
mean over a shard, a sum of means, or a division by the size of the axis. A function that is linear in an operand passes
the operand's scale on, a quotient subtracts the scale of the divisor, and operands of a sum must have equal scales.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...rules.spec import ALL, Rule
from ...spmd.errors import Violation
from ...spmd.types import ZERO, P, SpmdType, V, scaled

__all__ = ["as_summands", "result_scale"]

Groups = Sequence[frozenset[int]]


def result_scale(axis: str, rule: Rule, groups: Groups, operand_types: Sequence[SpmdType | None]) -> int:
    """The scale of the results of a call.

    Args:
        groups: of operands in which the call is jointly linear.
        operand_types: on this axis; None for an operand of which only the shape is read. The scale of V is a guess, for
            the case that it counts as a summand, and no reason for an error.

    Raises:
        Violation: operands of different scales are added up; or the function is not linear in one that has a scale.
    """
    # Linear in some whatever the others are (`copy_`): those others are overwritten.
    overwriting = [group for group in groups if any(other and other < group for other in groups)]
    groups = [group for group in groups if group not in overwriting]
    overwritten = frozenset().union(*overwriting) - frozenset().union(*groups)
    scales = {
        i: type_.scale
        for i, type_ in enumerate(operand_types)
        if type_ is not None and type_ is not ZERO and i not in overwritten
    }
    if not any(scales.values()):
        return 0
    everything = frozenset(range(len(operand_types)))
    groups = groups or [everything if group == ALL[0] else frozenset(group) & everything for group in rule.positive]
    unclear = {i for i in scales if operand_types[i].base is V}  # type: ignore[union-attr]
    factors: list[int] = []
    for group in groups:
        terms = [i for i in group if i in scales and all(i not in other for other in groups if other is not group)]
        if len({scales[i] for i in terms}) > 1 and not unclear.intersection(terms):
            raise _mixture(axis, terms, operand_types)
        factors.append(max((scales[i] for i in terms if i in unclear or not unclear.intersection(terms)), default=0))
    for index, scale in scales.items():
        holders = [factor for group, factor in zip(groups, factors) if index in group]
        if index in unclear or index in rule.inverse:
            continue
        if len(holders) > 1 and sum(holders) != scale:
            others = [i for i in scales if i != index and i not in unclear and scales[i] != scale]
            if not others:  # the other factors are guesses
                continue
            raise _mixture(axis, [index, others[0]], operand_types)
        if not holders and scale:
            raise Violation(
                "scale_nonlinear",
                axis,
                f"every rank has {_times(scale)} one process has, and {rule.name} is not linear in it: divide first",
                [index],
            )
    return sum(factors) - sum(scales.get(index, 0) for index in rule.inverse)


def as_summands(violation: Violation, operand_types: Sequence[SpmdType]) -> list[SpmdType] | None:
    """The operand types, with equal ones of the violation as summands, if that may remove the violation.

    A value that is equal on all ranks is their mean: R at scale k is P at scale k + 1.
    """
    if violation.rule not in ("partial_plus", "bias"):
        return None
    partial = {type_.scale for type_ in operand_types if type_.base is P} or {0}
    changed = list(operand_types)
    for index in violation.operands:
        type_ = operand_types[index]
        if type_.letter == "R" and type_.scale + 1 in partial:
            changed[index] = scaled(P, type_.scale + 1)
    return changed if changed != list(operand_types) else None


def _times(scale: int) -> str:
    power = "N" if abs(scale) == 1 else f"N^{abs(scale)}"
    return f"{power} times what" if scale > 0 else f"1/{power} of what"


def _mixture(axis: str, indices: Sequence[int], operand_types: Sequence[SpmdType | None]) -> Violation:
    first, second = [index for index in indices if operand_types[index] is not None][:2]
    one, two = operand_types[first], operand_types[second]
    return Violation(
        "scales",
        axis,
        f"{one} and {two} do not add up: they differ by a power of N, the size of {axis}; multiply or divide one of "
        f'them by comm.size("{axis}")',
        [first, second],
    )

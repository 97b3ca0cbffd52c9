"""Norms of shards: `P("norm")`, ranks' numbers whose squares are the summands of a squared norm.

    x.norm() of S             P("norm")
    stack, cat, norm of it    P("norm")
    its square                P

Everything else needs all of the norm, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....rules import Rule
from ....spmd.types import PARTIAL_NORM, P, R
from ..judge import Judgement, Operand

__all__ = ["squared_axes", "with_squares"]


def squared_axes(
    rule: Rule, args: Sequence[Any], kwargs: Mapping[str, Any], operands: list[Operand]
) -> tuple[list[Operand], list[str]]:
    """The operands of a square, with norms of shards as equal values, and the axes of these norms; else no axes."""
    name = rule.name.strip("_")
    power = args[1] if len(args) > 1 else kwargs.get("exponent")
    is_square = name == "square" or (name in ("pow", "ipow", "float_power") and power.__class__ in (int, float))
    if not is_square or (name != "square" and power != 2):
        return operands, []
    type_ = operands[0].type
    axes = [axis for axis, spmd_type in type_ if spmd_type is PARTIAL_NORM]
    for axis in axes:
        type_ = type_.with_axis(axis, R)
    return [operands[0]._replace(type=type_), *operands[1:]], axes


def with_squares(judgement: Judgement, axes: Sequence[str]) -> Judgement:
    """The judgement of a square, with the summands of squared norms."""
    type_ = judgement.types[0]
    for axis in axes:
        type_ = type_.with_axis(axis, P)
    return judgement._replace(types=(type_,)) if axes else judgement

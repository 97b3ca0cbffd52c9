"""Types of what is made rather than computed: constants, counts, and random numbers, by the stream they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....comm import context
from ....spmd.random import TENSOR_PARALLEL, streams
from ....spmd.tensor_type import EQUAL, UNIFORM_TYPE, ZERO_TYPE, TensorType
from ....spmd.types import DIFFERING, R, SpmdType, V
from ..judge import Operand
from ..rules import Rule
from ..session import Session

__all__ = ["drawing", "draws", "made_type", "stream_type"]


def draws(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers: dropout does not, with probability 0 or in evaluation mode."""
    return bool(rule.random(*args, **kwargs)) if callable(rule.random) else rule.random


def drawing(mode: Session) -> tuple[bool, tuple[str, ...]]:
    """All that decides about the type of random numbers: whether they differ by tp rank, and the axes of the mesh."""
    own = context.is_initialized() and streams().drawing == TENSOR_PARALLEL
    return own, mode.atoms(("pp", "dp", "cp", "tp"))


def stream_type(mode: Session, like: TensorType | None = None) -> tuple[TensorType, tuple[str, ...]]:
    """The type of random numbers that are drawn now: equal on tp, unless they come from the tensor-parallel stream.

    Args:
        like: of the tensor that they meet element by element; along its shards, numbers that differ by rank are as
            sharded as it is.

    Returns:
        The type, and what had to be assumed.
    """
    own, atoms = drawing(mode)
    types: dict[str, SpmdType] = {}
    assumed = []
    for axis in dict.fromkeys((*(like.types if like is not None else ()), *atoms)):
        spmd_type = like.get(axis) if like is not None else None
        differs = axis != "tp" or own
        if spmd_type is not None and spmd_type.letter == "S":
            types[axis] = R
            if not differs:
                assumed.append(f"random numbers are the same on every piece along {axis}: draw them inside of fork()")
        elif differs:
            types[axis] = V
    return TensorType.of(types, R), tuple(assumed)


def made_type(
    mode: Session, rule: Rule, operands: Sequence[Operand], numbers: Sequence[Operand]
) -> tuple[TensorType, tuple[str, ...]]:
    """The type of what a factory makes, and what had to be assumed.

    Args:
        given: its tensor operands.
        numbers: those that differ by rank.
    """
    if rule.kind == "random":
        return stream_type(mode)
    if rule.kind == "zero" or rule.name.startswith(("empty", "new_empty", "zeros", "new_zeros")):
        return ZERO_TYPE, ()
    base = EQUAL
    if rule.kind == "uniform" or rule.name.startswith(("ones", "full", "new_ones", "new_full")):
        base = UNIFORM_TYPE
    types: dict[str, SpmdType] = {axis: V for operand in numbers for axis, spmd_type in operand.type if spmd_type is V}
    if rule.kind == "factory" and not rule.name.startswith("new_"):  # of `x.new_...` only the dtype is read
        types.update(
            {
                axis: spmd_type
                for operand in operands
                for axis, spmd_type in operand.type
                if spmd_type.letter in DIFFERING
            }
        )
    return TensorType.of(types, base.rest), ()

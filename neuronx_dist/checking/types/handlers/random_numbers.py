"""Types of tensors that are made and not computed: constants, counts, and random numbers, by their stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ....rules import Rule
from ....spmd.tensor_type import EQUAL, UNIFORM_TYPE, ZERO_TYPE, TensorType
from ....spmd.types import DIFFERING, VARYING, R, Shard, SpmdType, V
from ..axis_powers import exponents_of
from ..judge import Operand
from ..session import Session
from .seeds import Stream, generator_in, stream

__all__ = ["drawing", "draws", "made_type", "stream_type"]


def draws(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether a call draws random numbers: dropout does not, with probability 0 or in evaluation mode."""
    return bool(rule.random(*args, **kwargs)) if callable(rule.random) else rule.random


def drawing(mode: Session) -> tuple[Stream, tuple[str, ...]]:
    """A key of the type of numbers from the default generator: its seed and the axes of the mesh."""
    return stream(mode, None), mode.atoms(("pp", "dp", "cp", "tp"))


def stream_type(
    mode: Session, generator: torch.Generator | None, like: TensorType | None = None
) -> tuple[TensorType, tuple[str, ...]]:
    """The type of random numbers that are drawn now: equal on axes on which the seed is equal.

    Args:
        generator: the source; None: the default one.
        like: type of the tensor that they meet element by element; numbers that differ by rank are sharded along
            its shards.

    Returns:
        The type, and the assumptions.
    """
    source, atoms = stream(mode, generator), mode.atoms(("pp", "dp", "cp", "tp"))
    types: dict[str, SpmdType] = {}
    assumed = []
    if generator is not None and mode.outside_seed is None:
        assumed.append("the generator has the same seed on all ranks")
    for axis in dict.fromkeys((*(like.types if like is not None else ()), *atoms)):
        spmd_type = like.get(axis) if like is not None else None
        differs = source.differs(axis)
        if spmd_type is not None and spmd_type.letter == "S":
            types[axis] = R
            if not differs and axis not in mode.data_axes():
                assumed.append(f"random numbers are the same on every piece along {axis}: draw them inside of fork()")
        elif differs:
            types[axis] = V
    return TensorType.of(types, R), tuple(assumed)


def made_type(
    mode: Session,
    rule: Rule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    operands: Sequence[Operand],
    numbers: Sequence[Operand],
) -> tuple[TensorType, tuple[str, ...]]:
    """The type of a factory's result, and the assumptions.

    Args:
        operands: tensors among the arguments.
        numbers: numbers among them that differ by rank.
    """
    if rule.kind == "random":
        type_, assumed = stream_type(mode, generator_in(args, kwargs))
        for axis in _sharded_data(mode, (args, kwargs.get("size")), operands):
            type_ = type_.with_axis(axis, V)
        return type_, assumed
    if rule.kind == "zero" or rule.name.startswith(("empty", "new_empty", "zeros", "new_zeros")):
        return ZERO_TYPE, ()
    base = EQUAL
    if rule.kind == "uniform" or rule.name.startswith(("ones", "full", "new_ones", "new_full")):
        base = UNIFORM_TYPE
    types: dict[str, SpmdType] = {axis: V for operand in numbers for axis, spmd_type in operand.type if spmd_type is V}
    if rule.name in ("ones_like", "full_like"):  # of a shard: their sum is a part of the count
        types.update({axis: spmd_type.base for axis, spmd_type in operands[0].type if isinstance(spmd_type, Shard)})
    if rule.name in ("full", "full_like", "new_full"):  # of the other operand only the shape or the dtype is read
        value = operands[rule.name != "full" :]
        types.update({axis: type_ for x in value for axis, type_ in x.type if type_.letter in DIFFERING})
    return TensorType.of(types, base.rest), ()


def _sharded_data(mode: Session, sizes: Any, operands: Sequence[Operand]) -> Iterator[str]:
    """Data axes along which each rank draws numbers for its part: with sizes of a shard, or in place of one."""
    exponents = [exponents_of(size) for size in _numbers_in(sizes)]
    for axis in mode.data_axes():
        local = any(of.get(axis, 0) < 0 for of in exponents)
        if local or any((operand.type.get(axis) or R).letter in VARYING for operand in operands):
            yield axis


def _numbers_in(sizes: Any) -> Iterator[Any]:
    for item in sizes if isinstance(sizes, (tuple, list)) else (sizes,):
        yield from _numbers_in(item) if isinstance(item, (tuple, list)) else (item,)

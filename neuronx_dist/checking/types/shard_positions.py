"""Where a shard is among the labels of a call's dims: from the type of an operand, and back to the type of a result.

A dim is a product of labels, outermost first (`rules/spec.py`), and one of them is what is sharded: two shards go
together if they are at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ...spmd.errors import Violation
from ...spmd.types import Shard, SpmdType, V
from .rules.spec import Dims, Spec

__all__ = ["ShardPosition", "difference", "locate", "part_of", "put", "put_together"]


_ALL = Fraction(0), Fraction(1)


class ShardPosition(NamedTuple):
    """Along which label a tensor is sharded: in `stride` blocks, `extent` positions of each counting.

    `part`: see `Shard`.
    """

    label: int
    stride: int
    extent: int
    part: tuple[Fraction, Fraction] | None = None


def part_of(part: tuple[Fraction, Fraction] | None, start: int, stop: int, length: int) -> tuple[Fraction, Fraction]:
    """The positions from `start` to `stop`, of `length`, of what is a part itself."""
    first, end = part or _ALL
    return first + (end - first) * Fraction(start, length), first + (end - first) * Fraction(stop, length)


def difference(own: ShardPosition, other: ShardPosition, own_type: Any, other_type: Any) -> str:
    """How the places of two shards differ, in words."""
    if own.label != other.label:
        why = f"one is sharded on dim {other_type.dim}, the other on dim {own_type.dim}: "
        return why + "these are different dims of the result, and every rank has but one pair of pieces"
    if own.stride != other.stride:
        return f"both are sharded on the same dim, but in another way ({other_type} and {own_type})"
    first, second = (f"{p[0]} to {p[1]}" if p is not None else "all" for p in (own.part, other.part))
    why = f"they are parts of each rank's piece, {first} and {second} of it"
    return f"{why}: what is side by side here is not in the whole"


def put_together(spec: Spec, spmd_types: Sequence[SpmdType | None]) -> SpmdType | None:
    """The type of a `cat` of parts of shards, one after the other along the dim that they are parts of; else None."""
    operands, out = spec.ins, spec.outs[0]
    at = next((d for d, factors in enumerate(out) if operands[0] is not None and factors != operands[0][d]), None)
    shards = [x for x in spmd_types if isinstance(x, Shard) and x.part is not None and x.stride == 1 and x.dim == at]
    parts = [shard.part for shard in shards if shard.part is not None]
    follow = all(one[1] == other[0] for one, other in zip(parts, parts[1:]))
    if at is None or len(parts) < max(2, len(operands)) or not follow:
        return None
    part = parts[0][0], parts[-1][1]
    return Shard(at, part=None if part == _ALL else part)


def locate(dims: Dims, shard: Shard, spec: Spec, axis: str, index: int, name: str) -> ShardPosition:
    """The factor of an operand's dim that a shard is along."""
    return _located(dims, shard, spec, axis, index, name)._replace(part=shard.part)


def _located(dims: Dims, shard: Shard, spec: Spec, axis: str, index: int, name: str) -> ShardPosition:
    factors = dims[shard.dim] if shard.dim < len(dims) else ()
    if not factors:
        raise Violation("broadcast", axis, f"dim {shard.dim} is sharded, and here of size 1, broadcast or dropped: it "
                        "would be another size in one process", [index])  # fmt: skip
    sizes = spec.sizes
    if len(factors) == 1:
        label = factors[0]
        blocks = sizes[label] // shard.stride
        return ShardPosition(label, shard.stride, blocks if shard.extent is None else shard.extent)
    outer = 1
    for number, label in enumerate(factors):
        size = sizes[label]
        if outer == shard.stride:
            skip = size == 1 and number + 1 < len(factors)
            if skip and label not in spec.weak:  # it was merged with a sharded inner dim
                skip = shard.extent not in (None, 1) and shard.extent >= sizes[factors[number + 1]]
            elif skip:
                skip = shard.extent != 1
            if not skip:
                return ShardPosition(label, 1, size if shard.extent is None else min(shard.extent, size))
        elif outer < shard.stride < outer * size and shard.stride % outer == 0 and size % (shard.stride // outer) == 0:
            inner = shard.stride // outer
            rest = size // inner
            return ShardPosition(label, inner, rest if shard.extent is None else min(shard.extent, rest))
        outer *= size
    if outer == shard.stride:  # one position in each block
        return ShardPosition(factors[-1], sizes[factors[-1]], 1)
    why = f"dim {shard.dim} is sharded in {shard.stride} blocks, and {name} does not cut it along them"
    raise Violation("fixed", axis, why, [index])


def put(out: Dims, position: ShardPosition, spec: Spec) -> SpmdType:
    """The type of a result with dims `out`."""
    for dim, factors in enumerate(out):
        if position.label in factors:
            if len(factors) == 1:
                everything = position.extent == spec.sizes[position.label] // position.stride
                return Shard(dim, position.stride, None if everything else position.extent, position.part)
            outer = total = 1
            for label in factors:
                if label == position.label:
                    outer = total
                total *= spec.sizes[label]
            stride = outer * position.stride
            # With one block it must be said what is sharded: it need not be the outermost factor of size 1.
            extent = None if outer > 1 and position.extent * stride == total else position.extent
            return Shard(dim, stride, extent, position.part)
    return V

"""The position of a shard among the labels of a call's dims: from an operand's type, and back to a result's.

A dim is a product of labels, outermost first (`rules/spec.py`), one of which is sharded: two shards fit if they have
the same position.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from ...rules.spec import Dims, Spec
from ...spmd.errors import Violation
from ...spmd.types import Dealt, Shard, SpmdType, V

__all__ = ["ShardPosition", "difference", "locate", "part_of", "put", "put_together"]


_ALL = Fraction(0), Fraction(1)


class ShardPosition(NamedTuple):
    """The label along which a tensor is sharded, in `stride` blocks of which `extent` positions count.

    `part`, `order`: see `Shard`.
    """

    label: int
    stride: int
    extent: int
    part: tuple[Fraction, Fraction] | None = None
    order: Dealt | None = None


def part_of(part: tuple[Fraction, Fraction] | None, start: int, stop: int, length: int) -> tuple[Fraction, Fraction]:
    """The positions from `start` to `stop`, of `length`, of a dim that is a part itself."""
    first, end = part or _ALL
    return first + (end - first) * Fraction(start, length), first + (end - first) * Fraction(stop, length)


def difference(one: ShardPosition, other: ShardPosition, one_type: Any, other_type: Any, name: str) -> str:
    """The difference between the positions of two shards that meet in a call of `name`, in words."""
    if one.label != other.label:
        why = f"dim {other_type.dim} of the one and dim {one_type.dim} of the other are sharded, which {name} does not "
        return why + "align: every rank has only one pair of pieces"
    if one.stride != other.stride:
        why = f"both are sharded on the same dim, one {_blocks(one)}, the other {_blocks(other)}"
        return f"{why}: the ranks hold different parts of it"
    if one.order != other.order:
        orders = (str(position.order or "each the one of its number") for position in (one, other))
        return f"the ranks hold different pieces of it: {', and '.join(orders)}"
    first, second = (f"{p[0]} to {p[1]}" if p is not None else "all" for p in (one.part, other.part))
    why = f"they are parts of each rank's piece, {first} and {second} of it"
    return f"{why}: neighbours here are not neighbours in the whole tensor"


def _blocks(position: ShardPosition) -> str:
    return "in one piece" if position.stride == 1 else f"in {position.stride} blocks, each sharded by itself"


def put_together(spec: Spec, spmd_types: Sequence[SpmdType | None]) -> SpmdType | None:
    """The type of a `cat` of consecutive parts of a sharded dim, along this dim; else None."""
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
    """The factor of an operand's dim that is sharded."""
    position = _located(dims, shard, spec, axis, index, name)
    if shard.order is not None and spec.sizes[position.label] // position.stride % len(shard.order.held[0]):
        raise Violation("fixed", axis, f"it is {shard}, and {name} cuts through a piece", [index])
    return position._replace(part=shard.part, order=shard.order)


def _located(dims: Dims, shard: Shard, spec: Spec, axis: str, index: int, name: str) -> ShardPosition:
    factors = dims[shard.dim] if shard.dim < len(dims) else ()
    if not factors:
        raise Violation("broadcast", axis, f"dim {shard.dim} is sharded and has size 1 here, so it is broadcast or "
                        "dropped; in one process it has another size", [index])  # fmt: skip
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
                return Shard(
                    dim, position.stride, None if everything else position.extent, position.part, order=position.order
                )
            outer = total = 1
            for label in factors:
                if label == position.label:
                    outer = total
                total *= spec.sizes[label]
            stride = outer * position.stride
            # With one block it must be said what is sharded: it need not be the outermost factor of size 1.
            extent = None if outer > 1 and position.extent * stride == total else position.extent
            return Shard(dim, stride, extent, position.part, order=position.order)
    return V

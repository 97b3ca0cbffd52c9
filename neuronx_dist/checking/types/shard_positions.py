"""Where a shard is among the labels of a call's dims: from the type of an operand, and back to the type of a result.

A dim is a product of labels, outermost first (`rules/spec.py`), and one of them is what is sharded: two shards go
together if they are at the same place.
"""

from __future__ import annotations

from typing import NamedTuple

from ...spmd.errors import Violation
from ...spmd.types import Shard, SpmdType, V
from .rules.spec import Dims, Spec

__all__ = ["ShardPosition", "locate", "put"]


class ShardPosition(NamedTuple):
    """Along which label a tensor is sharded: in `stride` blocks, `extent` positions of each counting."""

    label: int
    stride: int
    extent: int


def locate(dims: Dims, shard: Shard, spec: Spec, axis: str, index: int, name: str) -> ShardPosition:
    """The factor of an operand's dim that a shard is along."""
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
                return Shard(dim, position.stride, None if everything else position.extent)
            outer = total = 1
            for label in factors:
                if label == position.label:
                    outer = total
                total *= spec.sizes[label]
            stride = outer * position.stride
            # With one block it must be said what is sharded: it need not be the outermost factor of size 1.
            return Shard(dim, stride, None if outer > 1 and position.extent * stride == total else position.extent)
    return V

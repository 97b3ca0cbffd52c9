"""Where a shard is among the labels of a call's dims: from the type of an operand, and back to the type of a result.

A dim is a product of labels, outermost first (`rules/spec.py`), and one of them is what is sharded: two shards go
together if they are at the same place.
"""

from __future__ import annotations

from typing import NamedTuple

from ...spmd.errors import Violation
from ...spmd.types import Shard, SpmdType, V
from .rules.spec import Dims, Spec

__all__ = ["Place", "locate", "put"]


class Place(NamedTuple):
    """Along which label a tensor is sharded: in `stride` blocks, `extent` positions of each counting."""

    label: int
    stride: int
    extent: int


def locate(dims: Dims, kind: Shard, spec: Spec, axis: str, index: int, name: str) -> Place:
    """The factor of a dim that is sharded."""
    factors = dims[kind.dim] if kind.dim < len(dims) else ()
    if not factors:
        raise Violation("broadcast", axis, f"dim {kind.dim} is sharded, and here of size 1, broadcast or dropped: it "
                        "would be another size in one process", [index])  # fmt: skip
    sizes = spec.sizes
    if len(factors) == 1:
        label = factors[0]
        blocks = sizes[label] // kind.stride
        return Place(label, kind.stride, blocks if kind.extent is None else kind.extent)
    outer = 1
    for number, label in enumerate(factors):
        size = sizes[label]
        if outer == kind.stride:
            skip = size == 1 and number + 1 < len(factors)
            if skip and label not in spec.weak:  # it was merged with a sharded inner dim
                skip = kind.extent not in (None, 1) and kind.extent >= sizes[factors[number + 1]]
            elif skip:
                skip = kind.extent != 1
            if not skip:
                return Place(label, 1, size if kind.extent is None else min(kind.extent, size))
        elif outer < kind.stride < outer * size and kind.stride % outer == 0 and size % (kind.stride // outer) == 0:
            inner = kind.stride // outer
            rest = size // inner
            return Place(label, inner, rest if kind.extent is None else min(kind.extent, rest))
        outer *= size
    if outer == kind.stride:  # one position in each block
        return Place(factors[-1], sizes[factors[-1]], 1)
    why = f"dim {kind.dim} is sharded in {kind.stride} blocks, and {name} does not cut it along them"
    raise Violation("fixed", axis, why, [index])


def put(out: Dims, place: Place, spec: Spec) -> SpmdType:
    """The type of a result with dims `out`."""
    for dim, factors in enumerate(out):
        if place.label in factors:
            if len(factors) == 1:
                whole = place.extent == spec.sizes[place.label] // place.stride
                return Shard(dim, place.stride, None if whole else place.extent)
            outer = total = 1
            for label in factors:
                if label == place.label:
                    outer = total
                total *= spec.sizes[label]
            stride = outer * place.stride
            # With one block it must be said what is sharded: it need not be the outermost factor of size 1.
            return Shard(dim, stride, None if outer > 1 and place.extent * stride == total else place.extent)
    return V

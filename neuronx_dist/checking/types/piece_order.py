"""Gathers of shards in another order than that of the ranks, as of zigzag sequences, and the pieces put in order.

A piece that each rank picks is V, `Picked`; a `cat` of all pieces of a dim is a shard, S with the order.
A gather leaves the pieces in the order of the ranks (0 3 1 2): its result is equal on all ranks, and `Jumbled` until a
`cat` of its pieces has all of them in order. Until then its dim goes through calls as that of a shard does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...rules.spec import Spec
from ...spmd.types import Dealt, LocalType, Shard, SpmdType, V

__all__ = ["Jumbled", "Picked", "gathered", "joined_pieces", "ordered"]


class Picked(LocalType):
    """V: another piece of dim `dim` on each rank; what a call makes of it is V, but for a `cat`."""

    __slots__ = ("dim", "order")

    def __init__(self, dim: int, order: Dealt) -> None:
        super().__init__("V", V.meaning, base=V)
        self.dim, self.order = dim, order

    def __reduce__(self) -> Any:
        return Picked, (self.dim, self.order)


class Jumbled(LocalType):
    """R or I (`plain`) of which dim `dim` consists of pieces that are not in order."""

    __slots__ = ("dim", "order", "plain")

    def __init__(self, plain: LocalType, dim: int, order: Dealt) -> None:
        super().__init__(plain.letter, plain.meaning)
        self.plain, self.dim, self.order = plain, dim, order

    @classmethod
    def of(cls, plain: LocalType, dim: int, order: Dealt) -> Jumbled:
        """Returns the only object of these."""
        return _KNOWN.get((plain, dim, order)) or _KNOWN.setdefault((plain, dim, order), cls(plain, dim, order))

    def __repr__(self) -> str:
        return f"{self.letter}, {self.order} on dim {self.dim}"

    def __reduce__(self) -> Any:
        return Jumbled.of, (self.plain, self.dim, self.order)

    @property
    def shard(self) -> Shard:
        """The shard that behaves as its dim does."""
        return Shard(self.dim, order=self.order)


_KNOWN: dict[Any, Jumbled] = {}


def gathered(spmd_type: SpmdType | None, plain: SpmdType) -> SpmdType | None:
    """The type of a gather of a shard along its dim, `plain` if the pieces are in order; None where it has none."""
    order = spmd_type.order if isinstance(spmd_type, Shard) else None
    if not isinstance(spmd_type, Shard) or order is None or order.in_order:
        return plain
    if spmd_type.scale or spmd_type.stride != 1 or not isinstance(plain, LocalType):
        return None
    return Jumbled.of(plain, spmd_type.dim, Dealt(order.total, (sum(order.held, ()),)))


def ordered(code: str, jumbled: Jumbled) -> str:
    """Code that puts the pieces of a tensor in order; "" where some are missing."""
    (pieces,), total, dim = jumbled.order.held, jumbled.order.total, jumbled.dim
    if sorted(pieces) != [*range(total)]:
        return ""
    places = [pieces.index(piece) for piece in range(total)]
    return f"torch.cat([{code}.chunk({total}, {dim})[i] for i in {places}], {dim})"


def joined_pieces(spec: Spec | None, spmd_types: Sequence[Any]) -> SpmdType | None:
    """The type of a `cat` along a dim of operands that each hold some pieces of it; None if it has none."""
    if spec is None or not all(getattr(spmd_type, "order", None) is not None for spmd_type in spmd_types):
        return None
    first, dims = spmd_types[0], spec.ins[0] or ()
    at = next((d for d, factors in enumerate(spec.outs[0]) if factors != dims[d]), None)
    held = tuple(sum(pieces, ()) for pieces in zip(*(one.order.held for one in spmd_types)))
    every, order = sum(held, ()), Dealt(first.order.total, held)
    plain = {(type(one), one.dim, one.order.total, getattr(one, "plain", one.scale)) for one in spmd_types}
    if len(plain) > 1 or first.dim != at or first.scale or len(set(every)) != len(every):
        return None
    complete = sorted(every) == [*range(order.total)]
    if isinstance(first, Jumbled):
        return first.plain if complete and order.in_order else Jumbled.of(first.plain, first.dim, order)
    if complete and order.in_order:
        return Shard(first.dim)
    return Shard(first.dim, order=order) if complete or isinstance(first, Shard) else None

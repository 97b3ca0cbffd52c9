"""Conversions of a value from one type to another: the operator of `spmd`, and the bytes that a rank sends.

For a value of B bytes on n ranks, a rank sends (n-1)/n B in an all-gather or a reduce-scatter, twice that in an
all-reduce, and (n-1)/n of its shard of B/n bytes in an all-to-all. The backward is that of the operator's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ... import spmd
from ...program.program import Call, LocalCall, Program, Value
from ...spmd.rows import ROWS, Key
from ...spmd.types import I, P, R, Shard, SpmdType

__all__ = [
    "OPERATORS",
    "Conversion",
    "RowsOfExperts",
    "WholeOnRank",
    "bytes_sent",
    "conversion",
    "has_type",
    "joined_call",
    "read_once",
    "suffix",
]


@dataclass(frozen=True, repr=False)
class RowsOfExperts(Shard):
    """S(0) of rows in order of experts, cut between experts: the routing decides how many rows a rank has.

    Nothing converts such a tensor: it goes from `to_experts` to `to_tokens`.

    Attributes:
        exchanged: the tokens are S(0), and rows travel between the ranks; False: each rank has all tokens.
    """

    exchanged: bool = False


@dataclass(frozen=True, repr=False)
class WholeOnRank(Shard):
    """S(0) of which one rank has all positions, and the others none: a table of `whole_tables.py`, and its rows.

    Nothing converts such a tensor.

    Attributes:
        rank: the rank that has it.
        share: of all such tensors the part on the rank that has most.
    """

    rank: int = 0
    share: float = field(default=1.0, compare=False)

    def __repr__(self) -> str:
        return f"S({self.dim}) on rank {self.rank}"


PRODUCTS = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm"}  # whose backward reads no result
OPERATORS = {
    name: getattr(spmd, name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert")
}


class Conversion(NamedTuple):
    """A call of an `spmd` operator.

    Attributes:
        operator: name in `spmd`: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "convert".
        src, dst: the types, as they are written in the call.
        forward, backward: bytes that a rank sends.
        collectives: number of collectives, forward and backward.
    """

    operator: str
    src: SpmdType
    dst: SpmdType
    forward: int
    backward: int
    collectives: tuple[int, int]

    def call(self, x: Any, axis: str, *, inplace: bool = False) -> LocalCall:
        """Returns the call of the operator on `x`; `inplace`: an all-reduce may overwrite `x`."""
        options: dict[str, Any] = {"src": self.src, "dst": self.dst}
        if self.dst.letter == "P":
            options["expert_mode"] = True
        if self.operator == "all_reduce" and inplace:
            options["inplace"] = True
        return LocalCall(OPERATORS[self.operator], (x, axis), options)


def joined_call(conversions: Sequence[Conversion], xs: Sequence[Any], axis: str) -> LocalCall:
    """Returns the one call that makes conversions of several tensors, by the same operator."""
    src, dst = tuple(each.src for each in conversions), tuple(each.dst for each in conversions)
    options = {name: types[0] if len({*types}) == 1 else types for name, types in (("src", src), ("dst", dst))}
    return LocalCall(spmd.together, (OPERATORS[conversions[0].operator], tuple(xs), axis), options)


def has_type(has: SpmdType, wanted: SpmdType, value: Value) -> bool:
    """Returns whether a value of type `has` is of type `wanted` too: equal copies without gradient are both R and I."""
    if isinstance(has, Shard) and isinstance(wanted, Shard):
        if type(has) is not Shard or type(wanted) is not Shard:
            return has == wanted
        return (has.dim, has.stride) == (wanted.dim, wanted.stride)
    letters = {has.letter, wanted.letter}
    return has.scale == wanted.scale and (len(letters) == 1 or (letters == {"R", "I"} and not value.requires_grad))


def read_once(value: Value, program: Program, consumers: Mapping[Value, Sequence[tuple[Call, int]]]) -> bool:
    """Returns whether a value is a matrix product with one reader, so that its conversion may overwrite it."""
    product = value.producer is not None and value.producer.name in PRODUCTS
    result = any(output is value for output in program.outputs)
    return product and not result and len(consumers.get(value, ())) == 1


def suffix(wanted: SpmdType) -> str:
    """Suffix of a converted value's name."""
    return "_" + wanted.letter + (str(wanted.dim) if isinstance(wanted, Shard) else "")


def conversion(value: Value, src: SpmdType, dst: SpmdType, size: int) -> Conversion | None:
    """Returns the conversion of a value from type `src` to `dst` on an axis of `size` ranks; None if there is none.

    There is none from S to P, none from R to I (the gradient would have to become equal on all ranks), and none from
    or to shards in blocks.

    Raises:
        ValueError: the types are equal.
    """
    if src == dst:
        raise ValueError(f"{value!r} is {src} already")
    operator = _operator(value.shape, src, dst, size)
    if operator is None:
        return None
    key = operator, src.letter, dst.letter
    back = ROWS[key].backward
    graded = value.requires_grad and (value.dtype.is_floating_point or value.dtype.is_complex)
    forward, backward = bytes_sent(key, value.nbytes, size), bytes_sent(back, value.nbytes, size) if graded else 0
    collectives = int(ROWS[key].communicates), int(graded and ROWS[back].communicates)
    return Conversion(operator, src, dst, forward, backward, collectives)


def _operator(shape: Sequence[int], src: SpmdType, dst: SpmdType, size: int) -> str | None:
    for spmd_type in (src, dst):
        if isinstance(spmd_type, Shard):
            if spmd_type != Shard(spmd_type.dim) or shape[spmd_type.dim] % size:
                return None
        elif spmd_type not in (R, I, P) and not (spmd_type is src and src == P("avg")):
            return None
    if src.letter == "P":
        if dst is P:
            return None
        return "reduce_scatter" if isinstance(dst, Shard) else "all_reduce"
    if isinstance(src, Shard):
        if isinstance(dst, Shard):
            return "all_to_all"
        return "all_gather" if dst is not P else None
    return "convert" if (src, dst) != (R, I) else None


def bytes_sent(key: Key, count: int, size: int) -> int:
    """Bytes that a rank sends for the operator of a row, on a value of `count` bytes globally."""
    if not ROWS[key].communicates or size == 1:
        return 0
    part = count * (size - 1) // size
    return {"all_reduce": 2 * part, "all_to_all": part // size}.get(key[0], part)

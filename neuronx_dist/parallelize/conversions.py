"""From one type of a value to another: by which operator of `spmd`, and what a rank sends for it.

Of a value of B bytes on n ranks a rank sends (n-1)/n B for an all-gather or a reduce-scatter, twice that for an
all-reduce, and (n-1)/n of its own piece, B/n, for an all-to-all. The backward is that of the operator's row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .. import spmd
from ..spmd.rows import ROWS, Key
from ..spmd.types import I, P, R, Shard, SpmdType
from .program import Call, LocalCall, Program, Value

__all__ = ["OPERATORS", "Conversion", "bytes_sent", "conversion", "has_type", "read_once", "suffix"]

PRODUCTS = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm"}  # their backward reads no result
OPERATORS = {
    name: getattr(spmd, name) for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert")
}


class Conversion(NamedTuple):
    """One call of an `spmd` operator.

    Attributes:
        operator: its name in `spmd`: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "convert".
        src, dst: the types, as they are written in the call.
        forward, backward: bytes that a rank sends.
        collectives: how many collectives are started, forward and backward.
    """

    operator: str
    src: SpmdType
    dst: SpmdType
    forward: int
    backward: int
    collectives: tuple[int, int]

    def call(self, x: Any, axis: str, *, inplace: bool = False) -> LocalCall:
        """The call of the operator on `x`; `inplace`: it may write over it, if it is an all-reduce."""
        options: dict[str, Any] = {"src": self.src, "dst": self.dst}
        if self.dst.letter == "P":
            options["expert_mode"] = True
        if self.operator == "all_reduce" and inplace:
            options["inplace"] = True
        return LocalCall(OPERATORS[self.operator], (x, axis), options)


def has_type(has: SpmdType, wanted: SpmdType, value: Value) -> bool:
    """Whether a value of one type is one of another as it is: equal copies that need no gradient are R and I."""
    if isinstance(has, Shard) and isinstance(wanted, Shard):
        return (has.dim, has.stride) == (wanted.dim, wanted.stride)
    letters = {has.letter, wanted.letter}
    return has.scale == wanted.scale and (len(letters) == 1 or (letters == {"R", "I"} and not value.requires_grad))


def read_once(value: Value, program: Program, consumers: Mapping[Value, Sequence[tuple[Call, int]]]) -> bool:
    """It is a matrix product that one call alone reads: whoever converts it for this call may write over it."""
    product = value.producer is not None and value.producer.name in PRODUCTS
    result = any(output is value for output in program.outputs)
    return product and not result and len(consumers.get(value, ())) == 1


def suffix(wanted: SpmdType) -> str:
    """What the name of a converted value ends in."""
    return "_" + wanted.letter + (str(wanted.dim) if isinstance(wanted, Shard) else "")


def conversion(value: Value, src: SpmdType, dst: SpmdType, size: int) -> Conversion | None:
    """How a value of type `src` becomes one of `dst` on an axis of `size` ranks; None: there is no way.

    There is none to P from S, none from R to I (its gradient would have to be made one value), and none from or to
    shards in blocks. What is of type `dst` already needs no conversion: that is an error here.

    Raises:
        ValueError: the types are the same.
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
    """What a rank sends for the operator of a row, on a value of `count` bytes in the whole."""
    if not ROWS[key].communicates or size == 1:
        return 0
    part = count * (size - 1) // size
    return {"all_reduce": 2 * part, "all_to_all": part // size}.get(key[0], part)

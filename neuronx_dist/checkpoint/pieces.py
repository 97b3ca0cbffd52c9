"""Where the elements of a rank's tensor lie in the whole, unpadded one: a list of rectangles.

    whole            [10, 4]      as it is without any layout
    padded           [12, 4]      divisible by tp = 2, and in blocks where layers are fused
    shard of tp 1    [6, 4]       holds rows 6..9 of the whole, and two rows of zeros
    its ZeRO-1 rows  [3, 4]       of dp 0: rows 6..8; of dp 1: row 9, and padding

Padding is in no rectangle: it is not written, and is zero when it is read back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..weights.shard_spec import ShardSpec

__all__ = ["Piece", "cut", "overlap", "pieces_of", "rows_of", "shifted", "whole_piece", "within"]


class Piece(NamedTuple):
    """A rectangle of a rank's tensor.

    Attributes:
        local: where it lies in the rank's tensor: a `slice(start, stop)` for each dim.
        offset: where it begins in the whole tensor.
        shape: its size, in both. A tensor without dims is the piece `((), (), ())`.
    """

    local: tuple[slice, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def pieces_of(spec: ShardSpec, index: int) -> list[Piece]:
    """The pieces of shard number `index`, `[spec.local_shape]`, in the whole parameter, `[spec.unpadded_shape]`.

    There is one for each fused block (`spec.stride`); none where a shard is padding alone.
    """
    whole = spec.unpadded_shape
    if spec.dim is None:
        return [whole_piece(whole)]
    start, stop = spec.positions(index)
    block, local_block = whole[spec.dim] // spec.stride, spec.local_shape[spec.dim] // spec.stride
    piece = whole_piece(whole)
    return [
        _along(
            piece, spec.dim, slice(number * local_block, number * local_block + stop - start), number * block + start
        )
        for number in range(spec.stride if stop > start else 0)
    ]


def whole_piece(shape: Sequence[int]) -> Piece:
    """The piece of a tensor that is whole on this rank."""
    return Piece(tuple(slice(0, size) for size in shape), (0,) * len(shape), tuple(shape))


def rows_of(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces of a tensor that holds rows `start` to `stop` (dim 0) of the one that `pieces` are of.

    As ZeRO-1 cuts a shard: `stop` may lie behind its last row.
    """
    rows = []
    for piece in pieces:
        begin, end = piece.local[0].start, piece.local[0].stop
        low, high = max(begin, start), min(end, stop)
        if low < high:
            rows.append(_along(piece, 0, slice(low - start, high - start), piece.offset[0] + low - begin))
    return rows


def shifted(pieces: Sequence[Piece], rows: int) -> list[Piece]:
    """The pieces of a tensor that begins `rows` rows (dim 0) farther down in the whole than the one they are of."""
    return [_along(piece, 0, piece.local[0], piece.offset[0] + rows) for piece in pieces]


def within(pieces: Sequence[Piece], start: int) -> list[Piece]:
    """The pieces of a tensor (dim 0 of which is `start` rows into another) as pieces of that one."""
    return [
        _along(piece, 0, slice(start + piece.local[0].start, start + piece.local[0].stop), piece.offset[0])
        for piece in pieces
    ]


def cut(piece: Piece, elements: int) -> Iterator[Piece]:
    """The piece in parts of at most so many elements, along its first dims."""
    if math.prod(piece.shape) <= elements:
        yield piece
        return
    dim = next(dim for dim, size in enumerate(piece.shape) if size > 1)
    step = max(1, elements // math.prod(piece.shape[dim + 1 :]))
    local = piece.local[dim]
    for start in range(0, piece.shape[dim], step):
        part = slice(local.start + start, min(local.start + start + step, local.stop))
        yield from cut(_along(piece, dim, part, piece.offset[dim] + start), elements)


def overlap(
    offset: Sequence[int], shape: Sequence[int], piece: Piece
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a saved rectangle of the whole tensor and a piece meet.

    Returns:
        `(slices of the rectangle, slices of the piece's local tensor)`; None if they do not.
    """
    theirs, ours = [], []
    for saved, size, at, length, local in zip(offset, shape, piece.offset, piece.shape, piece.local):
        low, high = max(saved, at), min(saved + size, at + length)
        if low >= high:
            return None
        theirs.append(slice(low - saved, high - saved))
        ours.append(slice(local.start + low - at, local.start + high - at))
    return tuple(theirs), tuple(ours)


def _along(piece: Piece, dim: int, local: slice, offset: int) -> Piece:
    """The piece with another extent in one dim."""

    def replaced(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return Piece(
        replaced(piece.local, local), replaced(piece.offset, offset), replaced(piece.shape, local.stop - local.start)
    )

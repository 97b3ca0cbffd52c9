"""Pieces of a rank's tensor: rectangles that say where its elements lie in the whole, unpadded tensor.

    whole            [10, 4]      without any layout
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

__all__ = ["TensorPiece", "cut", "overlap", "pieces_of", "rows_of", "shifted", "whole_piece", "within"]


class TensorPiece(NamedTuple):
    """A rectangle of a rank's tensor.

    Attributes:
        local: place in the rank's tensor: a `slice(start, stop)` for each dim.
        offset: first element in the whole tensor.
        shape: size, in both tensors. A tensor without dims is the piece `((), (), ())`.
    """

    local: tuple[slice, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def pieces_of(spec: ShardSpec, index: int) -> list[TensorPiece]:
    """The pieces of shard number `index`, `[spec.local_shape]`, in the whole parameter, `[spec.unpadded_shape]`.

    There is one piece for each fused block (`spec.stride`); none where a shard is padding alone.
    """
    whole = spec.unpadded_shape
    if spec.dim is None:
        return [whole_piece(whole)]
    start, stop = spec.positions(index)
    block, local_block = whole[spec.dim] // spec.stride, spec.shape_of(index)[spec.dim] // spec.stride
    piece = whole_piece(whole)
    return [
        _along(
            piece, spec.dim, slice(number * local_block, number * local_block + stop - start), number * block + start
        )
        for number in range(spec.stride if stop > start else 0)
    ]


def whole_piece(shape: Sequence[int]) -> TensorPiece:
    """The piece of a tensor that this rank holds whole."""
    return TensorPiece(tuple(slice(0, size) for size in shape), (0,) * len(shape), tuple(shape))


def rows_of(pieces: Sequence[TensorPiece], start: int, stop: int) -> list[TensorPiece]:
    """Pieces of rows `start` to `stop` (dim 0) of a tensor that has `pieces`.

    ZeRO-1 cuts a shard so: `stop` may lie after the last row.
    """
    rows = []
    for piece in pieces:
        begin, end = piece.local[0].start, piece.local[0].stop
        low, high = max(begin, start), min(end, stop)
        if low < high:
            rows.append(_along(piece, 0, slice(low - start, high - start), piece.offset[0] + low - begin))
    return rows


def shifted(pieces: Sequence[TensorPiece], rows: int) -> list[TensorPiece]:
    """The pieces moved down by `rows` rows (dim 0) of the whole tensor."""
    return [_along(piece, 0, piece.local[0], piece.offset[0] + rows) for piece in pieces]


def within(pieces: Sequence[TensorPiece], start: int) -> list[TensorPiece]:
    """The pieces of rows of a tensor, from row `start` (dim 0) on, as pieces of that tensor."""
    return [
        _along(piece, 0, slice(start + piece.local[0].start, start + piece.local[0].stop), piece.offset[0])
        for piece in pieces
    ]


def cut(piece: TensorPiece, elements: int) -> Iterator[TensorPiece]:
    """Cuts a piece along its first dims into parts with a bounded number of elements."""
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
    offset: Sequence[int], shape: Sequence[int], piece: TensorPiece
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The overlap of a saved rectangle of the whole tensor with a piece.

    Returns:
        `(slices of the rectangle, slices of the piece's local tensor)`; None without overlap.
    """
    saved_slices, local_slices = [], []
    for saved, size, at, length, local in zip(offset, shape, piece.offset, piece.shape, piece.local):
        low, high = max(saved, at), min(saved + size, at + length)
        if low >= high:
            return None
        saved_slices.append(slice(low - saved, high - saved))
        local_slices.append(slice(local.start + low - at, local.start + high - at))
    return tuple(saved_slices), tuple(local_slices)


def _along(piece: TensorPiece, dim: int, local: slice, offset: int) -> TensorPiece:
    """The piece with another extent in one dim."""

    def replaced(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    return TensorPiece(
        replaced(piece.local, local), replaced(piece.offset, offset), replaced(piece.shape, local.stop - local.start)
    )

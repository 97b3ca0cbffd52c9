"""Where the elements of a rank's tensor lie in the whole, unpadded one: a list of rectangles.

    whole            [10, 4]      as it is without any layout
    padded           [12, 4]      divisible by tp = 2, and in blocks where layers are fused
    shard of tp 1    [6, 4]       holds rows 6..9 of the whole, and two rows of zeros
    its ZeRO-1 rows  [3, 4]       of dp 0: rows 6..8; of dp 1: row 9, and padding

Padding is in no rectangle: it is not written, and is zero when it is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..weights.shard_spec import ShardSpec

__all__ = ["Piece", "overlap", "pieces_of", "rows_of"]


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
        return [_piece([(0, size) for size in whole], whole, (0,) * len(whole))]
    start, stop = spec.positions(index)
    block, local_block = whole[spec.dim] // spec.stride, spec.local_shape[spec.dim] // spec.stride
    pieces = []
    for number in range(spec.stride if stop > start else 0):
        local = [(0, size) for size in whole]
        local[spec.dim] = (number * local_block, number * local_block + stop - start)
        offset = [0] * len(whole)
        offset[spec.dim] = number * block + start
        pieces.append(_piece(local, whole, offset))
    return pieces


def rows_of(pieces: Sequence[Piece], start: int, stop: int) -> list[Piece]:
    """The pieces of a tensor that holds rows `start` to `stop` (dim 0) of the one that `pieces` are of.

    As ZeRO-1 cuts a shard: `stop` may lie behind its last row.
    """
    rows = []
    for piece in pieces:
        first, *rest = piece.local
        low, high = max(first.start, start), min(first.stop, stop)
        if low < high:
            offset = (piece.offset[0] + low - first.start, *piece.offset[1:])
            rows.append(Piece((slice(low - start, high - start), *rest), offset, (high - low, *piece.shape[1:])))
    return rows


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


def _piece(local: Sequence[tuple[int, int]], whole: Sequence[int], offset: Sequence[int]) -> Piece:
    shape = tuple(stop - start for start, stop in local)
    return Piece(tuple(slice(start, stop) for start, stop in local), tuple(offset), shape)

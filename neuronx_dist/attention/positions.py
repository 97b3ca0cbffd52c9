"""Positions of rows in a sequence, for causal attention: a tensor's rows are runs of positions.

The rows of a rank are mostly one run. In zig-zag order (Llama 3, arXiv:2407.21783, section 3.3.2) the sequence is cut
into `2 * ranks` chunks, and rank r has chunks r and `2 * ranks - 1 - r`: every rank computes the same number of scores
under a causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

__all__ = ["BlockPiece", "Runs", "cut", "joined", "visible", "zigzag_order", "zigzag_runs"]

_TILE = 128  # rows of queries, at least, that are computed at once under a window

Runs = tuple[tuple[int, int], ...]  # the positions [start, stop) of consecutive rows


class BlockPiece(NamedTuple):
    """Rows `[rows[0], rows[1])` of a rank's queries see keys `[keys[0], keys[1])` of a block.

    Attributes:
        diagonal: row i of the piece sees its keys 0..i only.
        band: row i of the piece sees key j if `0 <= band + i - j < window`; None: the window hides no key.
        batch: the row of the batch, where documents differ between rows; None: all rows.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    diagonal: bool
    band: int | None = None
    batch: int | None = None


def zigzag_runs(length: int, ranks: int) -> Runs:
    """Returns the positions of a sequence in zig-zag order for `ranks` ranks, rank by rank.

    Where `2 * ranks` does not divide the length, the last chunks are shorter.
    """
    chunks = 2 * ranks
    bounds = [length * index // chunks for index in range(chunks + 1)]
    order = [chunk for rank in range(ranks) for chunk in (rank, chunks - 1 - rank)]
    return tuple((bounds[chunk], bounds[chunk + 1]) for chunk in order)


def zigzag_order(length: int, ranks: int) -> torch.Tensor:
    """Returns the position of each row in zig-zag order, `[length]`: `x[:, zigzag_order(n, ranks)]` has that order."""
    return torch.cat([torch.arange(*run) for run in zigzag_runs(length, ranks)])


def cut(runs: Runs, start: int, stop: int) -> Runs:
    """Returns the positions of rows `[start, stop)` of rows that stand at `runs`."""
    result, before = [], 0
    for first, last in runs:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            result.append((first + low, first + high))
        before += last - first
    return tuple(result)


def joined(parts: Sequence[Runs]) -> Runs:
    """Returns the positions of the rows of several parts, one after the other: neighbours become one run."""
    result: list[tuple[int, int]] = []
    for start, stop in (run for runs in parts for run in runs):
        if result and result[-1][1] == start:
            result[-1] = result[-1][0], stop
        else:
            result.append((start, stop))
    return tuple(result)


@lru_cache(maxsize=256)
def visible(
    queries: Runs,
    keys: Runs,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: Runs | None = None,
    batch: int | None = None,
) -> tuple[BlockPiece, ...]:
    """Returns the keys that the queries see, as rectangles, diagonals and bands.

    Args:
        causal: keys at or before the position of a query; False: all.
        window: of them the last `window`.
        documents: positions `[start, stop)`: a query sees keys of its document only; None: one document.
        batch: goes into the pieces.
    """
    pieces: list[BlockPiece] = []
    row = 0
    for first, last in queries:
        for low, high in documents or ((0, last),):
            begin, end = max(first, low), min(last, high)
            column = 0
            for start, stop in keys if begin < end else ():
                left, right = max(start, low), min(stop, high) if documents else stop
                if left < right:
                    found = _visible(begin, end, left, right, causal, window)
                    pieces += [_moved(piece, row + begin - first, column + left - start, batch) for piece in found]
                column += stop - start
        row += last - first
    return tuple(pieces)


def _moved(piece: BlockPiece, row: int, column: int, batch: int | None) -> BlockPiece:
    rows, keys = piece.rows, piece.keys
    return BlockPiece(
        (rows[0] + row, rows[1] + row), (keys[0] + column, keys[1] + column), piece.diagonal, piece.band, batch
    )


def _visible(first: int, last: int, start: int, stop: int, causal: bool, window: int | None) -> list[BlockPiece]:
    """Returns the pieces of queries at `[first, last)` and keys at `[start, stop)`, counted from their beginnings."""
    if not causal:
        return [BlockPiece((0, last - first), (0, stop - start), False)]
    if window is None:
        return _causal(first, last, start, stop)
    pieces = []
    tile = max(window, _TILE)  # the part of a band that nobody sees is about as large as the part that somebody sees
    for begin in range(first, last, tile):
        end = min(begin + tile, last)
        left, right = max(start, begin - window + 1), min(stop, end)
        if left >= right:
            continue
        if end - 1 - left < window:
            found = _causal(begin, end, left, right)
        else:
            found = [BlockPiece((0, end - begin), (0, right - left), False, begin - left)]
        pieces += [_moved(piece, begin - first, left - start, None) for piece in found]
    return pieces


def _causal(first: int, last: int, start: int, stop: int) -> list[BlockPiece]:
    pieces = []
    end = min(first, stop)
    if start < end:  # before all of the queries
        pieces.append(BlockPiece((0, last - first), (0, end - start), False))
    low, high = max(first, start), min(last, stop)
    if low < high:
        pieces.append(BlockPiece((low - first, last - first), (low - start, high - start), True))
    return pieces

"""Positions of rows in a sequence, for causal attention: a tensor's rows are runs of positions.

The rows of a rank are mostly one run. In zig-zag order (Llama 3, arXiv:2407.21783, section 3.3.2) the sequence is cut
into `2 * ranks` chunks, and rank r has chunks r and `2 * ranks - 1 - r`: every rank computes the same number of scores
under a causal mask.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["BlockPiece", "Runs", "cut", "visible", "zigzag_order", "zigzag_runs"]

Runs = tuple[tuple[int, int], ...]  # the positions [start, stop) of consecutive rows


class BlockPiece(NamedTuple):
    """Rows `[rows[0], rows[1])` of a rank's queries see keys `[keys[0], keys[1])` of a block.

    `diagonal`: row i of the piece sees its keys 0..i only.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    diagonal: bool


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


def visible(queries: Runs, keys: Runs) -> list[BlockPiece]:
    """Returns the keys at or before the positions of the queries, as rectangles and diagonals."""
    pieces = []
    row = 0
    for first, last in queries:
        column = 0
        for start, stop in keys:
            end = min(first, stop)
            if start < end:  # before all of the queries
                pieces.append(BlockPiece((row, row + last - first), (column, column + end - start), False))
            low, high = max(first, start), min(last, stop)
            if low < high:
                pieces.append(
                    BlockPiece(
                        (row + low - first, row + last - first), (column + low - start, column + high - start), True
                    )
                )
            column += stop - start
        row += last - first
    return pieces

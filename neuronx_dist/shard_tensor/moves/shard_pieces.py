"""Pieces of a shard: views to read, and gradients to add at the same places."""

from __future__ import annotations

import torch

from .intervals import Piece

__all__ = ["add", "of_owner"]


def of_owner(x: torch.Tensor, piece: Piece, dim: int) -> torch.Tensor:
    """Returns the positions of a piece in its owner's shard; one, if it is repeated."""
    if piece.step in (0, 1):
        return x.narrow(dim, piece.start, piece.rows)
    rows = _strided(x, piece, dim)
    return rows if piece.step > 0 else rows.flip(dim)


def add(result: torch.Tensor, piece: Piece, rows: torch.Tensor, dim: int) -> None:
    """Adds the gradient of a piece at its place in the owner's shard."""
    if piece.step in (0, 1):
        result.narrow(dim, piece.start, piece.rows).add_(rows)
    else:
        _strided(result, piece, dim).add_(rows if piece.step > 0 else rows.flip(dim))


def _strided(x: torch.Tensor, piece: Piece, dim: int) -> torch.Tensor:
    """Returns a view of a piece's positions, ascending."""
    first, last = sorted((piece.start, piece.start + (piece.length - 1) * piece.step))
    return x[(slice(None),) * dim + (slice(first, last + 1, abs(piece.step)),)]

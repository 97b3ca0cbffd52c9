"""Errors of checkpoints."""

from __future__ import annotations

__all__ = ["CheckpointCorrupted", "CheckpointError", "CheckpointMismatch"]


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says which and why."""


class CheckpointCorrupted(CheckpointError):
    """A file of a checkpoint is missing, truncated, or not what was written.

    Attributes:
        overwritten: keys of tensors that may hold values of this checkpoint now; empty if nothing was changed.
    """

    overwritten: frozenset[str] = frozenset()


class CheckpointMismatch(CheckpointError):
    """A checkpoint is of another model: names or shapes differ."""

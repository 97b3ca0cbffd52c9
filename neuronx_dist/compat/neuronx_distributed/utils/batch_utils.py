"""NxD's part of a batch for a context-parallel rank."""

from __future__ import annotations

from typing import Any

import torch

from .... import comm

__all__ = ["get_batch_on_this_context_parallel_rank", "shift_labels"]

_IGNORED = -100


def shift_labels(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch with `labels`, `[b, s]`, moved one place to the left: the last place is -100."""
    labels = batch.get("labels")
    if labels is None:
        return dict(batch)
    return {**batch, "labels": torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), _IGNORED)), dim=1)}


def get_batch_on_this_context_parallel_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns this cp rank's part of the sequences, `[b, s]` -> `[b, s / cp]`, contiguous, of labels that are shifted.

    The model must not shift labels again. Without context parallelism the batch is returned as it is.

    Raises:
        ValueError: cp does not divide the sequence.
    """
    size, rank = comm.size("cp"), comm.rank("cp")
    if size == 1:
        return batch
    part = {}
    for name, value in shift_labels(batch).items():
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] > 1:
            if value.shape[1] % size:
                raise ValueError(f"{name} {list(value.shape)}: dim 1 does not divide by {size} context-parallel ranks")
            value = value.chunk(size, dim=1)[rank]
        part[name] = value
    return part

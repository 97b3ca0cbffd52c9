"""NxD's part of a batch for a context-parallel rank."""

from __future__ import annotations

from typing import Any

from .... import comm
from ....attention import batch as attention_batch
from ....attention.batch import shift_labels

__all__ = ["get_batch_on_this_context_parallel_rank", "shift_labels"]


def get_batch_on_this_context_parallel_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns this cp rank's part of the sequences, `[b, s]` -> `[b, s / cp]`, contiguous, of labels that are shifted.

    The model must not shift labels again. Without context parallelism the batch is returned as it is. Unlike
    `nxd.get_batch_on_this_context_parallel_rank` it adds no `position_ids`, as NxD's.

    Raises:
        ValueError: cp does not divide the sequence.
    """
    if comm.size("cp") == 1:
        return batch
    part = attention_batch.split_batch(batch, None, "cp")
    if "position_ids" not in batch:
        part.pop("position_ids", None)
    return part

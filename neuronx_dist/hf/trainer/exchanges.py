"""Exchanges of ranks around transformers' loop: of labels, losses, predictions, and checksums of batches."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from accelerate.utils import recursively_apply

from ... import comm

__all__ = ["by_data_rank", "compare_batches", "from_last_stage", "mean_over_data", "whole_logits"]

_DATA = ("dp", "cp")
_REPLICA = ("pp", "cp", "tp")  # ranks with the same rows


def by_data_rank(count: torch.Tensor) -> torch.Tensor:
    """Returns the labels of all dp ranks, divided by dp x cp: gradients are means over these ranks."""
    return comm.all_reduce(count, "dp") / comm.size(_DATA)


def mean_over_data(x: torch.Tensor) -> torch.Tensor:
    """Returns the mean over dp and cp, equal on all ranks."""
    return comm.all_reduce(x, _DATA) / comm.size(_DATA)


def whole_logits(logits: torch.Tensor, vocabulary: int, places: torch.Tensor | None) -> torch.Tensor:
    """Gathers logits over tp and cp, `[b, s/cp, padded/tp]` -> `[b, s, vocabulary]`.

    Args:
        places: of this rank's tokens in their sequences, `[s/cp]`; None without cp.
    """
    whole = comm.all_gather(logits.contiguous(), "tp", dim=-1)[..., :vocabulary]
    if places is None:
        return whole
    order = comm.all_gather(places.to(whole.device), "cp").argsort()
    return comm.all_gather(whole.contiguous(), "cp", dim=1)[:, order]


def from_last_stage(x: torch.Tensor | None, stage: int, device: torch.device) -> torch.Tensor:
    """Returns the tensor of the stage that holds the end of the model, on every stage; others pass None."""
    shape, dtype = comm.broadcast_object(None if x is None else (x.shape, x.dtype), "pp", stage)
    return comm.broadcast(torch.empty(shape, dtype=dtype, device=device) if x is None else x, "pp", src=stage)


def compare_batches(batches: list[Any], step: int) -> None:
    """Refuses ranks of one replica that have other rows than one another.

    Raises:
        RuntimeError: on all ranks of the replica.
    """
    sums: list[int] = []

    def add(x: torch.Tensor) -> torch.Tensor:
        sums.append(zlib.crc32(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()))
        return x

    recursively_apply(add, batches)
    everywhere = comm.gather_objects(sums, _REPLICA)
    if others := [index for index, theirs in enumerate(everywhere) if theirs != everywhere[0]]:
        degrees = ", ".join(f"{axis}={comm.size(axis)}" for axis in _REPLICA)
        raise RuntimeError(
            f"Trainer: step {step}: the ranks of one replica ({degrees}) loaded different batches: rank {others[0]} of "
            "it has others than rank 0. Does the dataset, its order or the collator draw random numbers? Give it a "
            "seed (DataCollatorForLanguageModeling(..., seed=0)), equal on all ranks"
        )

"""Exchanges of ranks around transformers' loop: of labels, losses, predictions, and checksums of batches.

`LabelShare` is where a model's loss meets the count of labels.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import nn

from ... import comm

__all__ = ["LabelShare", "by_data_rank", "compare_batches", "from_last_stage", "mean_over_data", "whole_logits"]

_DATA = ("dp", "cp")
_REPLICA = ("pp", "cp", "tp")  # ranks with the same rows


class LabelShare:
    """Makes a loss that is a mean over the labels of its batch their part of the mean over all labels.

    A call of the model with `num_items_in_batch` returns `loss * labels / num_items_in_batch`, as a model does whose
    loss takes this number; the model itself does not get it. In a pipeline this is recorded with the model's forward.

    Args:
        shifts: whether the loss leaves out the first label of each row, read at each call.
    """

    def __init__(self, model: nn.Module, shifts: Callable[[], bool]) -> None:
        self.shifts, self.count = shifts, None
        model.register_forward_pre_hook(self._take_count, with_kwargs=True)
        model.register_forward_hook(self._weigh, with_kwargs=True)

    def _take_count(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.count = kwargs.get("num_items_in_batch")
        return args, {name: x for name, x in kwargs.items() if name != "num_items_in_batch"}

    def _weigh(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        count, self.count = self.count, None
        labels = kwargs.get("shift_labels", kwargs.get("labels"))
        if count is None or labels is None:
            return output
        labels = labels[..., 1:] if self.shifts() and kwargs.get("shift_labels") is None else labels
        number = labels.ne(-100).sum()
        loss = output["loss"] if isinstance(output, dict) else output[0]
        loss = torch.where(number > 0, loss * number / count, 0.0)  # the mean of no labels is NaN
        if not isinstance(output, dict):
            return loss, *output[1:]
        output["loss"] = loss
        return output


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

"""The causal language-model loss on vocabulary-parallel logits, with the signature of Hugging Face's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .. import comm
from ..gradients.reduce import global_num_items, number_of_valid
from ..parallel_layers.linear_cross_entropy import parallel_linear_cross_entropy
from ..parallel_layers.loss_functions import parallel_cross_entropy
from ..program.recorder import is_recording
from ..sharded_functions.vocabulary import check_ids, hide_padding
from .deferred_logits import DeferredLogits

__all__ = ["causal_lm_loss"]


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | float | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    inplace_logits: bool = False,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """Cross entropy of each token with the next, divided by the number of labels that count.

    Args:
        logits: this rank's `[batch, seq, vocab/tp]`, any floating dtype; computed in float32 at least.
        labels: `[batch, seq]`, not shifted; `ignore_index` where nothing is to be predicted. At cp > 1 shifted, as
            `get_batch_on_this_context_parallel_rank` returns them. Unused with `shift_labels`.
        vocab_size: of the whole vocabulary. Where tp does not divide it, the columns after it (of `pad_vocab=True`) are
            set to -inf, in place.
        num_items_in_batch: what the sum is divided by, for a mean over more than this call; None: the valid labels of
            this call. On several data-parallel ranks, with averaged gradients, that is the mean over all labels only if
            each rank has as many valid ones; `global_num_items` counts them all. At cp > 1 it is what None means.
        shift_labels: `[batch, seq]`, shifted already.
        inplace_logits: may the loss write over the logits? See `parallel_cross_entropy`.
        label_smoothing: as torch's `cross_entropy`: of each token's loss this part is the mean over the vocabulary.

    Returns:
        0-dim loss, equal on all tensor-parallel ranks. Without any valid label it is 0, and so are its gradients.

    Raises:
        IndexError: a label is outside the vocabulary (checked on CPU, where it costs no synchronisation).
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("causal_lm_loss: pass labels or shift_labels")
        is_shifted = comm.size("cp") > 1
        shift_labels = labels if is_shifted else nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    shift_labels = shift_labels.to(logits.device)
    smoothing = label_smoothing * (vocab_size - 1) / vocab_size  # NeMo's, which `parallel_cross_entropy` takes
    total = sum_of_losses(logits, shift_labels, vocab_size, ignore_index, inplace_logits, smoothing)
    count: Any = num_items_in_batch
    if count is None:
        if comm.size("cp") > 1:  # the last part has no label of the last token
            count = global_num_items(shift_labels, 1, ignore_index, shift=False, dtype=total.dtype)
        else:
            count = number_of_valid(shift_labels, ignore_index)
    # Without labels 0 / inf: unlike 1, inf is the same whatever share of all labels is counted here.
    if isinstance(count, torch.Tensor):
        count = count.to(total)
        return total / torch.where(count == 0, math.inf, count)
    return total / (count or math.inf)


def sum_of_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    ignore_index: int,
    inplace_logits: bool,
    label_smoothing: float,
) -> torch.Tensor:
    """Returns the sum of the tokens' losses, `[.., vocab/tp]`, `[..] -> []`; of deferred logits from the head's input.

    A pipeline records it as one call, which the last stage makes with the logits that its head returns.
    """
    if is_recording(layers=True) and has_torch_function_variadic(logits, labels):
        arguments = (logits, labels, vocab_size, ignore_index, inplace_logits, label_smoothing)
        total: torch.Tensor = handle_torch_function(sum_of_losses, (logits, labels), *arguments)
        return total
    if isinstance(logits, DeferredLogits):
        if call := logits.take_call(vocab_size):
            with call.autocasting():
                return parallel_linear_cross_entropy(
                    call.x,
                    call.weight,
                    labels,
                    bias=call.bias,
                    reduction="sum",
                    ignore_index=ignore_index,
                    vocab_size=vocab_size,
                    label_smoothing=label_smoothing,
                    sequence_dimension=call.sequence_dim,
                    reduce_dtype=call.reduce_dtype,
                )
        logits = logits.computed()
    hide_padding(logits, vocab_size)
    if type(labels) is torch.Tensor and labels.device.type == "cpu":  # padding is no label
        check_ids(labels, vocab_size, ignore_index, "causal_lm_loss: label")
    options: dict[str, Any] = dict(ignore_index=ignore_index, inplace_logits=inplace_logits)
    return parallel_cross_entropy(logits, labels, label_smoothing, **options).sum()

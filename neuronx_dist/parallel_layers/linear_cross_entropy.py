"""The output layer and its loss in one function, over a sharded vocabulary: no rank holds the logits of all tokens."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from .. import comm
from ..comm import Communicator
from ..comm.context import AxisLike
from ..gradients.reduce import number_of_valid
from ..sharded_functions.linear_cross_entropy import LossOptions, linear_cross_entropy_of_shard
from ..sharded_functions.vocabulary import check_ids, padded_vocabulary
from ..weights.shard_spec import spec_of
from .first_batch import compare_noted, note_first

__all__ = ["note_adapter", "parallel_linear_cross_entropy", "parallel_linear_logprobs"]

REDUCTIONS = ("none", "sum", "mean")


def parallel_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    bias: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
    sequence_dimension: int | None = None,
    chunk_size: int | None = None,
    tensor_model_parallel_group: AxisLike | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> torch.Tensor:
    """Cross entropy of the logits `input · weightᵀ + bias`, which are never whole in memory; in fp32 or better.

    `[.., in]`, `[vocab/tp, in]`, labels `[..]` `-> []`, or `[..]` with `reduction="none"`: the values and gradients of
    `ColumnParallelLinear(.., gather_output=False)` and `parallel_cross_entropy`, with memory for `chunk_size` tokens'
    logits. In compiled code, on XLA, under `torch.func` and with ShardTensors it is computed by these two.

    Args:
        input: the last hidden states, equal on all tensor-parallel ranks; with `sequence_dimension` the rank's shard
            of them.
        weight, bias: the rank's shard of the output layer, `[vocab/tp, in]` and `[vocab/tp]`: `lm_head.weight`, or the
            weight of a tied embedding.
        labels: ids in the whole vocabulary, of the whole sequence, equal on all ranks.
        label_smoothing, ignore_index: as in `parallel_cross_entropy`: NeMo's smoothing, which is that of torch with
            `label_smoothing * K / (K - 1)` for a vocabulary of K.
        vocab_size: size of the whole vocabulary, whose padding does not count; None: that of the weight's layer.
        reduction: "mean" over the labels that are not ignored (0 without any), "sum", or "none". "none" computes the
            logits a second time in backward.
        z_loss: factor of the square of each token's log-sum-exp, which is added to its loss (PaLM, arXiv:2204.02311).
        sequence_dimension: dim of `input` that is sharded over the tensor-parallel ranks (sequence parallelism).
        chunk_size: number of tokens whose logits exist at a time; None: at least 512, and as many as need about the
            memory of `input`.
        reduce_dtype: the input's gradient is summed over the ranks in `promote_types(dtype, reduce_dtype)`.

    Raises:
        TypeError: labels are floating-point numbers.
        ValueError: shapes do not match, an unknown reduction, smoothing outside of [0, 1], `chunk_size` below 1; or the
            layer of the weight has an adapter that is not merged.
        IndexError: a label is outside of the vocabulary (checked on CPU, where it costs no synchronisation).
    """
    name = "parallel_linear_cross_entropy"
    if reduction not in REDUCTIONS:
        raise ValueError(f"{name}: reduction={reduction!r} is none of {', '.join(REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1], got {label_smoothing}")
    options = LossOptions(
        comm.communicator(tensor_model_parallel_group or "tp"),
        vocab_size or 0,
        sequence_dimension,
        reduce_dtype,
        label_smoothing,
        ignore_index,
        z_loss,
        chunk_size,
        by_token=reduction == "none",
    )
    options = _checked(name, input, weight, labels, options)
    losses: torch.Tensor = linear_cross_entropy_of_shard(input, weight, bias, labels, options)
    if reduction != "mean":
        return losses
    count = number_of_valid(labels, ignore_index).to(losses)
    return losses / torch.where(count == 0, math.inf, count)


def parallel_linear_logprobs(
    input: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    sequence_dimension: int | None = None,
    chunk_size: int | None = None,
    tensor_model_parallel_group: AxisLike | None = None,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of labels, and entropies, of the logits `input · weightᵀ + bias`, which are never whole.

    `[.., in]`, `[vocab/tp, in]`, labels `[..]` `-> [..]`, `[..]`, in fp32 or better, both with gradients: what policy
    losses of reinforcement learning read. Equal to `log_softmax(logits / temperature)` at the labels, and to
    `-Σ p log p`, of whole logits. Labels are not shifted: pass `hidden[:, :-1]` and `ids[:, 1:]`. Backward computes the
    logits a second time.

    Args:
        labels: ids in the whole vocabulary; one equal to `ignore_index` has log-probability 0. The entropy is that of
            every token, whatever its label.
        temperature: divisor of the logits, a number.

    The other arguments, and errors, are those of `parallel_linear_cross_entropy`.
    """
    name = "parallel_linear_logprobs"
    if isinstance(temperature, torch.Tensor):
        raise TypeError(
            f"{name}: temperature is a tensor {list(temperature.shape)}, which may learn, and must be a number: divide "
            "the input and the bias by the tensor"
        )
    if not temperature > 0.0:
        raise ValueError(f"{name}: temperature must be above 0, got {temperature}")
    if temperature != 1.0:
        input, bias = input / temperature, None if bias is None else bias / temperature
    options = LossOptions(
        comm.communicator(tensor_model_parallel_group or "tp"),
        vocab_size or 0,
        sequence_dimension,
        reduce_dtype,
        ignore_index=ignore_index,
        chunk_size=chunk_size,
        by_token=True,
        entropy=True,
    )
    options = _checked(name, input, weight, labels, options)
    losses, entropy = linear_cross_entropy_of_shard(input, weight, bias, labels, options)
    return -losses, entropy


def _checked(
    name: str, input: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, options: LossOptions
) -> LossOptions:
    """Returns the options with the size of the vocabulary (0: that of the weight's layer), if the arguments fit."""
    communicator, vocab_size = options.communicator, options.vocabulary or None
    if isinstance(weight, nn.Module):
        raise TypeError(f"{name}: weight is a {type(weight).__name__}, a module: pass its weight, as lm_head.weight")
    _refuse_adapter(name, weight)
    spec = spec_of(weight)
    if vocab_size is None and spec.axis is not None and spec.dim == 0:
        vocab_size = spec.unpadded
    vocabulary = vocab_size or weight.shape[0] * communicator.size
    _check_arguments(name, input, weight, labels, options.chunk_size)
    _check_sizes(name, input, weight, labels, communicator, vocab_size, options.sequence_dim)
    note_first(labels, communicator, "labels")
    compare_noted(communicator)
    if type(labels) is torch.Tensor and labels.device.type == "cpu":
        check_ids(labels, vocabulary, options.ignore_index, f"{name}: label")
    return options._replace(vocabulary=vocabulary)


_adapters: WeakValueDictionary[int, Any] = WeakValueDictionary()  # by the id of a weight: its layer, with an adapter


def note_adapter(adapter: Any) -> None:
    """Records a layer with an adapter, so that the loss is not computed from its weight alone."""
    weight = getattr(adapter.base_layer, "weight", None)
    if weight is not None and not isinstance(adapter.base_layer, nn.Embedding):
        _adapters[id(weight)] = adapter


def _refuse_adapter(name: str, weight: torch.Tensor) -> None:
    adapter = _adapters.get(id(weight))
    if adapter is not None and adapter.base_layer.weight is weight and not adapter.merged:
        raise ValueError(
            f"{name}: the weight's layer has an adapter, which is no part of the weight: merge "
            "it, leave the output layer out of its target_modules, or call the layer and parallel_cross_entropy"
        )


def _check_arguments(
    name: str, input: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk_size: int | None
) -> None:
    if labels.is_floating_point():
        raise TypeError(
            f"{name}: labels are {labels.dtype} of shape {tuple(labels.shape)}: pass ids, as integers: labels.long(). "
            "Probabilities of classes are not supported. (The order of the arguments is input, weight, labels)"
        )
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"{name}: chunk_size must be a number of tokens, got {chunk_size}")
    if labels.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: labels are {labels.dtype}: pass ids as torch.int64: labels.long()")
    if weight.dim() != 2 or input.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"{name}: input of shape {tuple(input.shape)} does not match the weight of shape {tuple(weight.shape)}: "
            "expected [.., in] and [vocab/tp, in]"
        )


def _check_sizes(
    name: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    communicator: Communicator,
    vocab_size: int | None,
    sequence_dim: int | None,
) -> None:
    size = communicator.size
    expected = list(input.shape[:-1])
    if sequence_dim is not None:
        if not -input.dim() <= sequence_dim < input.dim() - 1 or sequence_dim == -1:
            raise ValueError(f"{name}: sequence_dimension={sequence_dim} is no dim of tokens of {list(input.shape)}")
        expected[sequence_dim % input.dim()] *= size
    if list(labels.shape) != expected:
        wholes = [[n * (1 + (size - 1) * (i == dim)) for i, n in enumerate(expected)] for dim in range(len(expected))]
        advice = ""
        if sequence_dim is None and list(labels.shape) in wholes:
            dim = wholes.index(list(labels.shape))
            advice = f". If input is a shard of {size} (sequence parallelism), pass sequence_dimension={dim}"
        raise ValueError(
            f"{name}: labels of shape {tuple(labels.shape)} do not match input of shape {tuple(input.shape)}; expected "
            f"{tuple(expected)}, the labels of the whole sequence{advice}"
        )
    if vocab_size is not None and weight.shape[0] * size != padded_vocabulary(vocab_size, size):
        raise ValueError(
            f"{name}: the weight of shape {tuple(weight.shape)} is no shard over {size} ranks of a vocabulary of "
            f"{vocab_size}"
        )

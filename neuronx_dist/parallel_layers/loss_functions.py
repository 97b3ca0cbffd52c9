"""NxD's cross entropy of logits that are sharded over the vocabulary: its arguments, and the refusal of wrong ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .. import comm
from ..comm import Communicator
from ..comm.context import AxisLike
from ..lazy_names import lazy_names
from ..sharded_functions.cross_entropy import cross_entropy_of_shard
from ..sharded_functions.vocabulary import check_ids, hide_padding, padded_vocabulary
from ..spmd.gathered_tensors import is_gathered
from ..spmd.watching import see_through
from .first_batch import compare_noted, note_first
from .signatures import accepts

__all__ = ["parallel_cross_entropy"]

__getattr__ = lazy_names(
    __name__, dict.fromkeys(("DistributedLogprob", "from_parallel_logits_to_logprobs"), "parallel_layers.logprobs")
)


@accepts("parallel_cross_entropy")
def parallel_cross_entropy(
    parallel_logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    inplace_logits: bool = False,
    tensor_model_parallel_group: AxisLike | None = None,
) -> torch.Tensor:
    """Cross entropy per token of vocabulary-sharded logits, in fp32 or better.

    `[.., vocab/tp]`, labels `[..]` (whole) `-> [..]`.

    Args:
        parallel_logits: this rank's shard, not changed without `inplace_logits`. Columns of -inf are not part of the
            vocabulary.
        labels: ids in the whole vocabulary, the same on all ranks; a label equal to `ignore_index` gives loss 0 and no
            gradient.
        label_smoothing: NeMo's and Megatron's definition, as NxD documents: with `s = label_smoothing * K / (K - 1)`
            for a vocabulary of K, `(1 - s) * nll - s * mean(log p)`; `torch.nn.functional.cross_entropy` calls that s
            its label_smoothing.
        vocab_size: size of the whole vocabulary, which is compared with the shards; None: not compared. If tp does not
            divide it, the shards are those of a vocabulary padded to the next multiple, whose last columns do not
            count.
        inplace_logits: the loss may overwrite the logits, and then needs no memory of their size. No code may use their
            values afterwards: a function that saved them for backward gets autograd's error. Not overwritten are leaves
            of autograd, and all logits without gradients (`no_grad`), in compiled code, on XLA, under `torch.func` and
            in a type check.

    Raises:
        TypeError: labels are floating-point numbers.
        ValueError: shapes do not match, or smoothing is outside [0, 1]; the logits are of the whole vocabulary (the
            output of a layer with `gather_output=True`), as is seen by `vocab_size`, by their autograd graph, or,
            without a graph, by their memory, which is the output of the layer.
        RuntimeError: in backward, with `inplace_logits=True`: a second backward, or other uses of the logits.
        IndexError: a label is outside the vocabulary (checked on CPU, where it costs no synchronisation).
    """
    options: dict[str, Any] = dict(vocab_size=vocab_size, inplace_logits=inplace_logits)
    options["tensor_model_parallel_group"] = tensor_model_parallel_group
    operands = (parallel_logits, labels)
    if has_torch_function_variadic(*operands):
        options = {name: value for name, value in options.items() if value is not None and value is not False}
        arguments = (*operands, label_smoothing)
        return handle_torch_function(parallel_cross_entropy, operands, *arguments, ignore_index=ignore_index, **options)
    return _cross_entropy(*operands, label_smoothing, ignore_index=ignore_index, **options)


def _cross_entropy(
    parallel_logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    inplace_logits: bool = False,
    tensor_model_parallel_group: AxisLike | None = None,
) -> torch.Tensor:
    if labels.is_floating_point():
        raise TypeError(
            f"parallel_cross_entropy: labels are {labels.dtype} of shape {tuple(labels.shape)}: pass ids, as integers: "
            "labels.long(). Probabilities of classes are not supported"
        )
    if labels.shape != parallel_logits.shape[:-1]:
        raise ValueError(
            f"parallel_cross_entropy: labels of shape {tuple(labels.shape)} do not match logits of shape "
            f"{tuple(parallel_logits.shape)}; expected {tuple(parallel_logits.shape[:-1])}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"parallel_cross_entropy: label_smoothing must be in [0, 1], got {label_smoothing}")
    communicator = comm.communicator(tensor_model_parallel_group or "tp")
    _check_logits(parallel_logits, communicator, vocab_size)
    note_first(labels, communicator, "labels")
    compare_noted(communicator)
    if vocab_size is not None and vocab_size % communicator.size:
        parallel_logits = hide_padding(parallel_logits.clone(), vocab_size, communicator)
    if type(labels) is torch.Tensor and labels.device.type == "cpu":
        vocabulary = vocab_size or parallel_logits.shape[-1] * communicator.size
        check_ids(labels, vocabulary, ignore_index, "parallel_cross_entropy: label")
    return cross_entropy_of_shard(
        parallel_logits, labels, communicator, label_smoothing, ignore_index, inplace=inplace_logits
    )


def _check_logits(logits: torch.Tensor, communicator: Communicator, vocab: int | None) -> None:
    size, local_vocab = communicator.size, logits.shape[-1]
    if vocab is not None:
        whole = local_vocab == vocab
        if local_vocab * size == padded_vocabulary(vocab, size):
            return
    elif size == 1 or torch.compiler.is_compiling():
        return
    else:
        whole = is_gathered(logits, communicator)
        if not whole:
            return
    shards = f"it needs each rank's shard [.., vocab/{size}] of the logits"
    advice = "; these are whole: build their layer with gather_output=False, or drop the gather" if whole else ""
    of = f" of a vocabulary of {vocab}" if vocab is not None else ""
    raise ValueError(f"parallel_cross_entropy: {shards}, and got {tuple(logits.shape)}{of}{advice}")


see_through(parallel_cross_entropy, _cross_entropy)

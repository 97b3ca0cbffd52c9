"""Cross entropy of logits that are sharded over the vocabulary.

logits z[.., V/t];  m = max z (all-reduce);  Z = Σ exp(z - m), y = z[target] - m  (one all-reduce of both)
loss = log Z - y;   dz = softmax(z) - onehot(target)       no communication
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import handle_torch_function, has_torch_function_unary

from .. import comm, spmd
from ..comm import Communicator
from ..comm.context import AxisLike
from ..comm.transforms import transforming
from ..spmd import I, P, R, V
from ..spmd.gathered import is_gathered
from ..spmd.watching import active, see_through
from .signatures import accepts
from .vocabulary import check_ids

__all__ = ["parallel_cross_entropy"]


class _ParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        communicator: Communicator,
        smoothing: float,
        ignore_index: int,
    ) -> torch.Tensor:
        vocab = logits.shape[-1] * communicator.size
        dtype = torch.promote_types(logits.dtype, torch.float32)
        highest = comm.all_reduce(logits.amax(-1), communicator, op="max").to(dtype)
        if active() is not None:  # of another one on each rank the sums below would be no sums
            spmd.assert_type(highest, {communicator: R})
        shifted = (
            torch.sub(logits, highest.unsqueeze(-1))
            if logits.dtype == dtype
            else logits.to(dtype).sub_(highest.unsqueeze(-1))
        )
        local, elsewhere = _own_labels(target, logits, communicator)
        predicted = shifted.gather(-1, local).squeeze(-1).masked_fill_(elsewhere, 0.0)
        sums: list[torch.Tensor] = [spmd.trust(predicted, communicator, P)]
        s = smoothing * vocab / (vocab - 1) if smoothing else 0.0
        if s:
            sums.append(spmd.trust(shifted.sum(-1), communicator, P))
        softmax = shifted.exp_()
        sums.append(spmd.trust(softmax.sum(-1), communicator, P))
        stacked = torch.stack(sums)
        stacked = comm.all_reduce(stacked, communicator, out=stacked)
        ignored = target == ignore_index
        loss = _loss(stacked, s, vocab).masked_fill_(ignored, 0.0)
        softmax.div_(stacked[-1].unsqueeze(-1))

        ctx.save_for_backward(softmax, local, elsewhere, ignored)
        ctx.smoothing, ctx.vocab, ctx.dtype = s, vocab, logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        softmax, local, elsewhere, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0).unsqueeze(-1)
        result = softmax * grad
        result.scatter_add_(-1, local, (grad * (ctx.smoothing - 1)).masked_fill_(elsewhere.unsqueeze(-1), 0.0))
        if ctx.smoothing:
            result -= grad * (ctx.smoothing / ctx.vocab)
        return result.to(ctx.dtype), None, None, None, None


def _own_labels(
    target: torch.Tensor, logits: torch.Tensor, communicator: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `[.., 1]` of the labels in this rank's logits, and which of them, `[..]`, are on other ranks."""
    local_vocab = logits.shape[-1]
    local = spmd.trust(target - communicator.coordinate(logits) * local_vocab, communicator, V)
    elsewhere = (local < 0) | (local >= local_vocab)
    return local.masked_fill(elsewhere, 0).unsqueeze(-1), elsewhere


def _loss(stacked: torch.Tensor, s: float, vocab: int) -> torch.Tensor:
    """The loss per token, of the sums over the vocabulary: y, with smoothing Σ (z - m), and Σ exp(z - m)."""
    predicted, log_total = stacked[0], stacked[-1].log()
    loss = log_total - predicted
    return (1 - s) * loss - s * (stacked[1] / vocab - log_total) if s else loss


def _cross_entropy_of_operators(
    logits: torch.Tensor, target: torch.Tensor, communicator: Communicator, smoothing: float, ignore_index: int
) -> torch.Tensor:
    """The same of operators, for `torch.func`."""
    vocab = logits.shape[-1] * communicator.size
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    shifted = logits - _Highest.apply(logits, communicator).unsqueeze(-1)
    local, elsewhere = _own_labels(target, logits, communicator)
    sums = [shifted.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0.0), shifted.exp().sum(-1)]
    s = smoothing * vocab / (vocab - 1) if smoothing else 0.0
    if s:
        sums.insert(1, shifted.sum(-1))
    stacked = spmd.all_reduce(torch.stack(sums), communicator, src=P, dst=I)
    return _loss(stacked, s, vocab).masked_fill(target == ignore_index, 0.0)


class _Highest(torch.autograd.Function):
    """The highest logit of a token, `[.., vocab/tp] -> [..]`, as a constant: the loss does not depend on it."""

    @staticmethod
    def forward(logits: torch.Tensor, communicator: Communicator) -> torch.Tensor:
        highest: torch.Tensor = comm.all_reduce(logits.amax(-1), communicator, op="max")
        return highest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> None:
        return None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], logits: torch.Tensor, communicator: Communicator
    ) -> tuple[torch.Tensor, int]:
        assert in_dims[0] is not None
        return _Highest.apply(logits.movedim(in_dims[0], 0), communicator), 0


@accepts("parallel_cross_entropy")
def parallel_cross_entropy(
    parallel_logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    tensor_model_parallel_group: AxisLike | None = None,
) -> torch.Tensor:
    """Cross entropy per token of vocabulary-sharded logits, in fp32 or better.

    `[.., vocab/tp]`, labels `[..]` (whole) `-> [..]`.

    Args:
        parallel_logits: this rank's shard; it is left as it is.
        labels: ids in the whole vocabulary, the same on all ranks; a label equal to `ignore_index` gives loss 0 and no
            gradient.
        label_smoothing: NeMo's and Megatron's definition, as NxD documents: with `s = label_smoothing * K / (K - 1)`
            for a vocabulary of K, `(1 - s) * nll - s * mean(log p)`; `torch.nn.functional.cross_entropy` calls that s
            its label_smoothing.
        vocab_size: of the whole vocabulary, to be compared with the shards; None: not compared.

    Raises:
        ValueError: shapes do not match, or smoothing is outside [0, 1]; the logits are whole (the output of a layer
            with `gather_output=True`): told by `vocab_size`, or by their autograd graph, if they have one.
        IndexError: a label is outside the vocabulary (checked on CPU, where it costs no synchronisation).
    """
    if has_torch_function_unary(parallel_logits):
        options: dict[str, Any] = {"vocab_size": vocab_size, "tensor_model_parallel_group": tensor_model_parallel_group}
        return handle_torch_function(
            parallel_cross_entropy,
            (parallel_logits,),
            parallel_logits,
            labels,
            label_smoothing,
            ignore_index=ignore_index,
            **{name: value for name, value in options.items() if value is not None},
        )
    return _cross_entropy(
        parallel_logits,
        labels,
        label_smoothing,
        ignore_index=ignore_index,
        vocab_size=vocab_size,
        tensor_model_parallel_group=tensor_model_parallel_group,
    )


def _cross_entropy(
    parallel_logits: torch.Tensor,
    labels: torch.Tensor,
    label_smoothing: float = 0.0,
    *,
    ignore_index: int = -100,
    vocab_size: int | None = None,
    tensor_model_parallel_group: AxisLike | None = None,
) -> torch.Tensor:
    if labels.shape != parallel_logits.shape[:-1]:
        raise ValueError(
            f"parallel_cross_entropy: labels of shape {tuple(labels.shape)} do not match logits of shape "
            f"{tuple(parallel_logits.shape)}; "
            f"expected {tuple(parallel_logits.shape[:-1])}"
        )
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"parallel_cross_entropy: label_smoothing must be in [0, 1], got {label_smoothing}")
    communicator = comm.communicator(tensor_model_parallel_group or "tp")
    _check_logits(parallel_logits, communicator, vocab_size)
    if type(labels) is torch.Tensor and labels.device.type == "cpu":
        check_ids(labels, parallel_logits.shape[-1] * communicator.size, ignore_index, "parallel_cross_entropy: label")
    function = _cross_entropy_of_operators if transforming() else _ParallelCrossEntropy.apply
    return function(parallel_logits, labels, communicator, label_smoothing, ignore_index)


def _check_logits(logits: torch.Tensor, communicator: Communicator, vocab: int | None) -> None:
    size, local_vocab = communicator.size, logits.shape[-1]
    if vocab is not None:
        whole = local_vocab == vocab
        if local_vocab * size == vocab:
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

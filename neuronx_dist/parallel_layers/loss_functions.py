"""Cross entropy of logits that are sharded over the vocabulary.

logits z[.., V/t];  m = max z (all-reduce);  Z = Σ exp(z - m), y = z[target] - m  (one all-reduce of both)
loss = log Z - y;   dz = exp(z - m) / Z - onehot(target)   computed from the logits again; no communication
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.compiler import is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

from .. import comm, spmd
from ..comm import Communicator
from ..comm.context import AxisLike
from ..comm.select import in_one_program
from ..comm.transforms import transforming
from ..spmd import I, P, R, V
from ..spmd.gathered import is_gathered
from ..spmd.watching import active, see_through
from .signatures import accepts
from .vocabulary import check_ids, hide_padding, padded_vocabulary

__all__ = ["parallel_cross_entropy"]

# Logits that are worked on at a time: 512 KiB of fp32, for a core's cache; elsewhere 64 MiB, to launch little.
_IN_CACHE, _IN_MEMORY = 1 << 17, 1 << 24


class _ParallelCrossEntropy(torch.autograd.Function):
    """Keeps the logits, and no softmax: forward and backward read them in pieces that stay in cache.

    In place, backward writes the gradient over them. Where they are precise enough (and no view, which torch does not
    allow; and there is no smoothing, which asks for the logits again) forward writes exp(z - m) over them before that;
    then they are a second result, so that autograd sees that they changed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        communicator: Communicator,
        smoothing: float,
        ignore_index: int,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        highest = comm.all_reduce(logits.amax(-1), communicator, op="max").to(dtype)
        if active() is not None:  # of another one on each rank the sums below would be no sums
            spmd.assert_type(highest, {communicator: R})
        local, elsewhere = _own_labels(target, logits, communicator)
        predicted = logits.gather(-1, local).squeeze(-1).to(dtype).sub_(highest).masked_fill_(elsewhere, 0.0)
        stored = inplace and logits.dtype == dtype and not smoothing and not logits._is_view()
        sums = [predicted, *_sums_by_pieces(logits, highest, smoothing, stored)]
        stacked = torch.stack([spmd.trust(each, communicator, P) for each in sums])
        stacked = comm.all_reduce(stacked, communicator, out=stacked)
        ignored = target == ignore_index
        loss = _loss(stacked, smoothing).masked_fill_(ignored, 0.0)

        ctx.save_for_backward(logits, highest, stacked, local, elsewhere, ignored)
        ctx.smoothing, ctx.inplace, ctx.stored, ctx.written = smoothing, inplace, stored, False
        if stored:
            ctx.mark_dirty(logits)
            ctx.set_materialize_grads(False)
        return loss, logits if stored else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None, grad_logits: torch.Tensor | None) -> Any:
        if ctx.written or grad_logits is not None or grad is None:
            what = "a second backward" if ctx.written else "the logits are used after the loss"
            raise RuntimeError(
                f"parallel_cross_entropy: {what}, with inplace_logits=True, which writes over the logits; leave "
                "inplace_logits out"
            )
        logits, highest, stacked, local, elsewhere, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0)
        at_label, per_column = -grad, []
        if ctx.smoothing:
            s = _share(ctx.smoothing, stacked)
            at_label, per_column = grad * (s - 1), [(grad * s / stacked[2]).unsqueeze(-1)]
        at_label = at_label.masked_fill(elsewhere, 0.0).unsqueeze(-1)
        weight = (grad / stacked[-1]).unsqueeze(-1)
        operands = (highest.unsqueeze(-1), weight, local, at_label, *per_column)
        ctx.written = ctx.inplace
        if ctx.stored:
            result = logits.detach().mul_(weight).scatter_add_(-1, local, at_label)
        elif logits.numel() <= (size := _piece_size(logits)) and not ctx.inplace:
            result = _gradient(None, logits, *operands).to(logits.dtype)
        else:
            result = logits.detach() if ctx.inplace else torch.empty_like(logits)
            for own, *piece in _pieces(size, result, logits, *operands):
                own.copy_(_gradient(own if own.dtype == stacked.dtype else None, *piece))
        return result, None, None, None, None, None


def _seen_whole(logits: torch.Tensor) -> bool:
    """Whether a compiler or the type checker looks at the code: it is one expression then, without writes in place."""
    return is_dynamo_compiling() or active() is not None or in_one_program(logits)


def _piece_size(logits: torch.Tensor) -> int:
    """How many logits are worked on at a time."""
    if _seen_whole(logits):
        return logits.numel()
    return _IN_CACHE if _on_cpu(logits) else _IN_MEMORY


def _on_cpu(logits: torch.Tensor) -> bool:
    return type(logits) is torch.Tensor and logits.device.type == "cpu"


def _all_finite(logits: torch.Tensor) -> bool:
    """Whether no column is -inf, which saves much of smoothing's time; False where it costs a synchronisation to look.

    (It takes a tenth of the time of a comparison with -inf. A sum that overflows says False too.)
    """
    if transforming() or _seen_whole(logits) or not _on_cpu(logits):
        return False
    return bool(logits.sum(-1).isfinite().all())


def _pieces(size: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same rows of all tensors: up to `size` elements of the first, and at least one row of it."""
    first = tensors[0]
    if first.numel() <= size or first.dim() == 1:
        yield tensors
    elif rows := size * len(first) // first.numel():
        yield from zip(*(x.split(rows) for x in tensors))
    else:
        for each in zip(*(x.unbind() for x in tensors)):
            yield from _pieces(size, *each)


def _sums_by_pieces(logits: torch.Tensor, highest: torch.Tensor, smoothing: float, store: bool) -> list[torch.Tensor]:
    """`_sums`, with memory for one piece of the logits; `store`: exp(z - m) is written over them."""
    if logits.numel() <= (size := _piece_size(logits)) and not store:
        return _sums(logits, highest, smoothing)
    result = [torch.empty_like(highest) for _ in range(3 if smoothing else 1)]
    for piece, top, *own in _pieces(size, logits.detach(), highest, *result):
        for sums, values in zip(own, _sums(piece, top, smoothing, piece if store else None)):
            sums.copy_(values)
    return result


def _sums(
    logits: torch.Tensor, highest: torch.Tensor, smoothing: float, out: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """This rank's Σ exp(z - m), `[..]`; with smoothing before it Σ (z - m) and the number of columns, without -inf."""
    shifted = torch.sub(logits, highest.unsqueeze(-1), out=out)
    sums = []
    if smoothing and _all_finite(shifted):
        sums = [shifted.sum(-1), torch.full_like(highest, shifted.shape[-1])]
    elif smoothing:
        absent = shifted == -math.inf
        sums = [shifted.masked_fill(absent, 0.0).sum(-1), (~absent).sum(-1, dtype=shifted.dtype)]
    return [*sums, shifted.exp_().sum(-1)]


def _gradient(
    out: torch.Tensor | None,
    logits: torch.Tensor,
    highest: torch.Tensor,
    weight: torch.Tensor,
    local: torch.Tensor,
    at_label: torch.Tensor,
    per_column: torch.Tensor | None = None,
) -> torch.Tensor:
    """`exp(z - m) * weight`, less `per_column` (but at -inf), plus `at_label` at the label; `out` may be the logits."""
    if per_column is not None and not _all_finite(logits):
        per_column = per_column.masked_fill(logits == -math.inf, 0.0)
    gradient = torch.sub(logits, highest, out=out).exp_().mul_(weight)
    if per_column is not None:
        gradient.sub_(per_column)
    return gradient.scatter_add_(-1, local, at_label)


def _own_labels(
    target: torch.Tensor, logits: torch.Tensor, communicator: Communicator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions `[.., 1]` of the labels in this rank's logits, and which of them, `[..]`, are on other ranks."""
    local_vocab = logits.shape[-1]
    local = spmd.trust(target - communicator.coordinate(logits) * local_vocab, communicator, V)
    elsewhere = (local < 0) | (local >= local_vocab)
    return local.masked_fill(elsewhere, 0).unsqueeze(-1), elsewhere


def _loss(stacked: torch.Tensor, smoothing: float) -> torch.Tensor:
    """The loss per token, of the sums over the vocabulary: y, and those of `_sums`."""
    predicted, log_total = stacked[0], stacked[-1].log()
    loss = log_total - predicted
    if not smoothing:
        return loss
    s = _share(smoothing, stacked)
    return (1 - s) * loss - s * (stacked[1] / stacked[2] - log_total)


def _share(smoothing: float, stacked: torch.Tensor) -> torch.Tensor:
    """The weight of the mean over the vocabulary, of K columns: smoothing * K / (K - 1)."""
    return smoothing * stacked[2] / (stacked[2] - 1)


def _cross_entropy_of_operators(
    logits: torch.Tensor, target: torch.Tensor, communicator: Communicator, smoothing: float, ignore_index: int
) -> torch.Tensor:
    """The same of operators, for `torch.func`."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = _Highest.apply(logits, communicator)
    local, elsewhere = _own_labels(target, logits, communicator)
    predicted = (logits.gather(-1, local).squeeze(-1) - highest).masked_fill(elsewhere, 0.0)
    sums = torch.stack([predicted, *_sums(logits, highest, smoothing)])
    stacked = spmd.all_reduce(sums, communicator, src=P, dst=I)
    return _loss(stacked, smoothing).masked_fill(target == ignore_index, 0.0)


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
    inplace_logits: bool = False,
    tensor_model_parallel_group: AxisLike | None = None,
) -> torch.Tensor:
    """Cross entropy per token of vocabulary-sharded logits, in fp32 or better.

    `[.., vocab/tp]`, labels `[..]` (whole) `-> [..]`.

    Args:
        parallel_logits: this rank's shard, left as it is. Columns of -inf are no part of the vocabulary.
        labels: ids in the whole vocabulary, the same on all ranks; a label equal to `ignore_index` gives loss 0 and no
            gradient.
        label_smoothing: NeMo's and Megatron's definition, as NxD documents: with `s = label_smoothing * K / (K - 1)`
            for a vocabulary of K, `(1 - s) * nll - s * mean(log p)`; `torch.nn.functional.cross_entropy` calls that s
            its label_smoothing.
        vocab_size: of the whole vocabulary, to be compared with the shards; None: not compared. If tp does not divide
            it, the shards are those of a vocabulary padded to the next multiple, whose last columns do not count.
        inplace_logits: the loss may write over the logits, and then takes no memory of their size; nobody may use their
            values afterwards. Autograd notices who does: what keeps them for another backward is told that they were
            modified. Leaves of autograd are left as they are, and so is everything without gradients (`no_grad`), in
            compiled code, on XLA, under `torch.func` and in a type check.

    Raises:
        ValueError: shapes do not match, or smoothing is outside [0, 1]; the logits are whole (the output of a layer
            with `gather_output=True`): told by `vocab_size`, or by their autograd graph, if they have one.
        RuntimeError: in backward, with `inplace_logits=True`: it is the second one, or the logits have other users.
        IndexError: a label is outside the vocabulary (checked on CPU, where it costs no synchronisation).
    """
    if has_torch_function_variadic(parallel_logits, labels):
        options: dict[str, Any] = {
            "vocab_size": vocab_size,
            "inplace_logits": inplace_logits or None,
            "tensor_model_parallel_group": tensor_model_parallel_group,
        }
        return handle_torch_function(
            parallel_cross_entropy,
            (parallel_logits, labels),
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
        inplace_logits=inplace_logits,
        tensor_model_parallel_group=tensor_model_parallel_group,
    )


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
    if vocab_size is not None and vocab_size % communicator.size:
        parallel_logits = hide_padding(parallel_logits.clone(), vocab_size, communicator)
    if type(labels) is torch.Tensor and labels.device.type == "cpu":
        vocabulary = vocab_size or parallel_logits.shape[-1] * communicator.size
        check_ids(labels, vocabulary, ignore_index, "parallel_cross_entropy: label")
    arguments = (parallel_logits, labels, communicator, label_smoothing, ignore_index)
    if transforming():
        return _cross_entropy_of_operators(*arguments)
    inplace = (
        inplace_logits and torch.is_grad_enabled() and not (parallel_logits.is_leaf or _seen_whole(parallel_logits))
    )
    loss: torch.Tensor = _ParallelCrossEntropy.apply(*arguments, inplace)[0]
    return loss


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

"""Cross entropy of logits that are sharded over the vocabulary.

logits z[.., V/t];  m = max z (all-reduce);  Z = Σ exp(z - m), y = z[target] - m  (one all-reduce of both)
loss = log Z - y;   dz = exp(z - m) / Z - onehot(target)   computed from the logits again; no communication
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from .. import comm, spmd
from ..comm import Communicator
from ..comm.context import AxisLike
from ..comm.rank_selection import in_one_program
from ..comm.verbs.transformed_tensors import transforming
from ..lazy_names import lazy_names
from ..spmd import I, P, R
from ..spmd.watching import active
from ..torch_internals.tensors import is_view
from .vocabulary import local_positions

__all__ = ["cross_entropy_of_shard"]

# Logits that are worked on at a time: 512 KiB of fp32, for a core's cache; elsewhere 64 MiB, to launch little.
_IN_CACHE, _IN_MEMORY = 1 << 17, 1 << 24
_late = lazy_names(__name__, {"fused_cross_entropy": "sharded_functions"})


class _ParallelCrossEntropy(torch.autograd.Function):
    """Keeps the logits, and no softmax: forward and backward read them in pieces that stay in cache.

    For a leaf, which stays in memory anyway, forward writes exp(z - m) into the gradient's memory: no second exp.
    Compiled kernels read large ones on a GPU. In place, backward writes the gradient over the logits. Where they are
    precise enough (and no view, which torch does not allow; and there is no smoothing, which asks for the logits again)
    forward writes exp(z - m) over them before that; then they are a second result, so that autograd sees the change.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        local: torch.Tensor,
        elsewhere: torch.Tensor,
        ignored: torch.Tensor,
        communicator: Communicator,
        smoothing: float,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        highest = comm.all_reduce(logits.amax(-1), communicator, op="max").to(dtype)
        if active() is not None:  # sums of differences to another number on each rank would be no sums
            spmd.assert_type(highest, {communicator: R})
        predicted = logits.gather(-1, local).squeeze(-1).to(dtype).sub_(highest).masked_fill_(elsewhere, 0.0)
        by_operators = smoothing or _seen_whole(logits) or not _on("cuda", logits)
        kernels = None if by_operators else _late("fused_cross_entropy")
        total = None if kernels is None else kernels.exp_sums(logits, highest)
        stored = inplace and logits.dtype == dtype and not smoothing and not is_view(logits) and total is None
        is_kept = ctx.needs_input_grad[0] and logits.is_leaf and logits.dtype == dtype and total is None
        is_kept = is_kept and not (smoothing or _seen_whole(logits))
        powers = logits if stored else torch.empty_like(logits) if is_kept else None  # memory for exp(z - m)
        totals = [total] if total is not None else _sums_by_pieces(logits, highest, smoothing, powers)
        sums = [predicted, *totals]
        stacked = torch.stack([spmd.trust(summand, communicator, P) for summand in sums])
        stacked = comm.all_reduce(stacked, communicator, out=stacked)
        loss = _loss(stacked, smoothing).masked_fill(ignored, 0.0)  # not in place: see RowLinear

        ctx.save_for_backward(logits, highest, stacked, local, elsewhere, ignored)
        ctx.communicator, ctx.smoothing = communicator, smoothing
        ctx.inplace, ctx.stored, ctx.written, ctx.powers = inplace, stored, False, None if stored else powers
        ctx.kernels = None if total is None else kernels
        if stored:
            ctx.mark_dirty(logits)
            ctx.set_materialize_grads(False)
        return loss, logits if stored else None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, grad_logits: torch.Tensor | None) -> Any:
        if ctx.written or grad_logits is not None or grad is None:
            what = "a second backward" if ctx.written else "the logits are used after the loss"
            raise RuntimeError(
                f"parallel_cross_entropy: {what}, but inplace_logits=True has overwritten the logits: use "
                "inplace_logits=False"
            )
        logits, highest, stacked, local, elsewhere, ignored = ctx.saved_tensors
        nothing = (None,) * 6
        if torch.is_grad_enabled() and not (ctx.inplace or is_dynamo_compiling()):  # create_graph=True
            loss = _by_operators(logits, local, elsewhere, ignored, ctx.communicator, ctx.smoothing)
            return *torch.autograd.grad(loss, logits, grad, create_graph=True), *nothing
        with torch.no_grad():
            weight = (grad.masked_fill(ignored, 0.0) / stacked[-1]).unsqueeze(-1)
            at_label, per_column = -stacked[-1], []
            if ctx.smoothing:
                s = _share(ctx.smoothing, stacked)
                at_label, per_column = at_label * (1 - s), [(stacked[-1] * s / stacked[2]).unsqueeze(-1)]
            at_label = at_label.masked_fill(elsewhere, 0.0).unsqueeze(-1)
            operands = (highest.unsqueeze(-1), weight, local, at_label, *per_column)
            ctx.written = ctx.inplace
            powers, ctx.powers = logits.detach() if ctx.stored else ctx.powers, None  # a second backward has none
            if powers is not None:
                result = powers.scatter_add_(-1, local, at_label).mul_(weight)
            elif ctx.kernels is None and not ctx.inplace and logits.numel() <= _piece_size(logits):
                result = _gradient(None, logits, *operands).to(logits.dtype)
            else:
                result = logits.detach() if ctx.inplace else torch.empty_like(logits)
                if ctx.kernels is not None and ctx.kernels.write_gradient(result, logits, *operands):
                    return result, *nothing
                size = _piece_size(logits)
                for out, *piece in _pieces(size, result, logits, *operands):
                    _gradient(out, *piece)
        return result, *nothing


def _seen_whole(logits: torch.Tensor) -> bool:
    """Returns whether a compiler or the type checker follows the code: no pieces then, and no writes in place."""
    return is_dynamo_compiling() or active() is not None or in_one_program(logits)


def _piece_size(logits: torch.Tensor) -> int:
    """Number of logits that are computed on at a time."""
    if _seen_whole(logits):
        return logits.numel()
    return _IN_CACHE if logits.device.type == "cpu" else _IN_MEMORY  # of fake tensors too, by which memory is estimated


def _on(device_type: str, logits: torch.Tensor) -> bool:
    return type(logits) is torch.Tensor and logits.device.type == device_type


def _all_finite(logits: torch.Tensor) -> bool:
    """Returns whether no column is -inf, which saves much of smoothing's time; False where the look would synchronise.

    (It takes a tenth of the time of a comparison with -inf. A sum that overflows says False too.)
    """
    if transforming() or _seen_whole(logits) or not _on("cpu", logits):
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
        for slices in zip(*(x.unbind() for x in tensors)):
            yield from _pieces(size, *slices)


def _sums_by_pieces(
    logits: torch.Tensor, highest: torch.Tensor, smoothing: float, powers: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """`_sums`, with memory for one piece of the logits; `powers`: receives exp(z - m), may be the logits."""
    if logits.numel() <= (size := _piece_size(logits)) and powers is None:
        return _sums(logits, highest, smoothing)
    result = [torch.empty_like(highest) for _ in range(3 if smoothing else 1)]
    stores = [] if powers is None else [powers.detach()]
    for piece, top, *out in _pieces(size, logits.detach(), highest, *result, *stores):
        for sums, values in zip(out, _sums(piece, top, smoothing, out.pop() if stores else None)):
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
    """`(exp(z - m) + at_label at the label - per_column) * weight`; per_column not at -inf. `out` may be the logits."""
    if per_column is not None and not _all_finite(logits):
        per_column = per_column.masked_fill(logits == -math.inf, 0.0)
    is_narrow = out is not None and out.dtype != highest.dtype
    gradient = torch.sub(logits, highest, out=None if is_narrow else out).exp_()
    if per_column is not None:
        gradient.sub_(per_column)
    gradient.scatter_add_(-1, local, at_label)
    return torch.mul(gradient, weight, out=out) if is_narrow else gradient.mul_(weight)  # the only rounding to `out`


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


def _by_operators(
    logits: torch.Tensor,
    local: torch.Tensor,
    elsewhere: torch.Tensor,
    ignored: torch.Tensor,
    communicator: Communicator,
    smoothing: float,
) -> torch.Tensor:
    """Composes the loss of operators, for `torch.func` and second derivatives."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    highest = _Highest.apply(logits, communicator)
    predicted = (logits.gather(-1, local).squeeze(-1) - highest).masked_fill(elsewhere, 0.0)
    sums = torch.stack([predicted, *_sums(logits, highest, smoothing)])
    stacked = spmd.all_reduce(sums, communicator, src=P, dst=I)
    return _loss(stacked, smoothing).masked_fill(ignored, 0.0)


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


def cross_entropy_of_shard(
    logits: torch.Tensor,
    target: torch.Tensor,
    axis: AxisLike,
    smoothing: float = 0.0,
    ignore_index: int = -100,
    *,
    first: int | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """Returns the cross entropy of each token, `[.., classes/n]` and targets `[..]` `-> [..]`, in fp32 or better: I.

    Args:
        logits: this rank's shard. Columns of -inf are no classes.
        target: R, positions in all classes, each of which some rank has, or `ignore_index`, whose loss is 0.
        smoothing: by NeMo's definition; `parallel_cross_entropy` has the formula.
        first: the class at which this rank's shard begins; None: shards have equal sizes.
        inplace: the loss may write over the logits, where autograd, compilers and checkers let it.
    """
    communicator = comm.communicator(axis)
    local, elsewhere = local_positions(target, logits.shape[-1], communicator, first)
    if not logits.shape[-1]:
        logits = F.pad(logits, (0, 1), value=-math.inf)
    operands = (logits, local.unsqueeze(-1), elsewhere, target == ignore_index, communicator, smoothing)
    if transforming():
        return _by_operators(*operands)
    inplace = inplace and torch.is_grad_enabled() and not (logits.is_leaf or _seen_whole(logits))
    loss: torch.Tensor = _ParallelCrossEntropy.apply(*operands, inplace)[0]
    return loss

"""Cross entropy of a linear layer whose classes are sharded, in chunks of tokens: no rank holds all its logits.

    z[c, V/t] = X[c, in] · W[V/t, in]ᵀ + b            c tokens at a time
    m, Σ exp(z - m), z[target] - m  of all ranks      two all-reduces of c numbers, as in cross_entropy.py
    dz = exp(z - lse) - onehot(target)                over z, in its memory
    dX = dz · W;   dW = Σ dzᵀ · X                     dX is partial over the ranks: reduced once, in backward

The sum of the losses has one gradient, a number. So forward computes dX and dW from the logits that it has, up to this
factor, and backward multiplies: three matrix products, as without chunks. Of the losses of single tokens backward
computes the logits a second time: four products. So it does with the entropies of the tokens' distributions:

    H = lse - Σ p z = log Σ exp(z - m) - Σ exp(z - m) (z - m) / Σ exp(z - m)       dH/dz = -p (log p + H)

Source: Liger kernels (arXiv:2410.10989) and Cut Cross Entropy (arXiv:2411.09009); here over the ranks of a vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.compiler import is_dynamo_compiling

from .. import comm, spmd
from ..comm import Communicator
from ..comm.rank_selection import in_one_program
from ..comm.verbs.transformed_tensors import transforming
from ..spmd import I, P, R, S
from ..spmd.local_holders import holds_local
from ..spmd.watching import active
from .cross_entropy import (
    _gradient,
    _loss,
    _piece_size,
    _pieces,
    _seen_whole,
    _sums_by_pieces,
    cross_entropy_of_shard,
)
from .softmax import LOWEST, entropy_of_shard, log_sum_exp, wide
from .vocabulary import hide_padding, local_positions

__all__ = ["LossOptions", "linear_cross_entropy_of_shard"]

_FLOAT16_SCALE = 64.0  # divisor of a sum over a chunk's tokens, which would be infinite in float16
_FEWEST = 512  # tokens of a chunk: with less, reading W and adding to dW take longer than their products


class LossOptions(NamedTuple):
    """Options of the loss, and of its ranks.

    Attributes:
        communicator: the ranks that hold the classes.
        vocabulary: number of all classes; the columns after it are padding.
        sequence_dim: dim of the input that is sharded over the same ranks; None: the input is equal on all of them.
        reduce_dtype: the input's gradient is summed in `promote_types(dtype, reduce_dtype)`.
        smoothing: by NeMo's definition, as in `parallel_cross_entropy`.
        z_loss: factor of the squared log-sum-exp.
        chunk_size: tokens whose logits exist at a time; None: chosen by `_chunk_size`.
        by_token: the result is each token's loss, not their sum.
        entropy: each token's entropy is a second result; only `by_token`.
        with_gradients: forward computes gradients; set by `linear_cross_entropy_of_shard`, because an autograd function
            does not see whether gradients are recorded.
    """

    communicator: Communicator
    vocabulary: int
    sequence_dim: int | None = None
    reduce_dtype: torch.dtype | None = torch.float32
    smoothing: float = 0.0
    ignore_index: int = -100
    z_loss: float = 0.0
    chunk_size: int | None = None
    by_token: bool = False
    entropy: bool = False
    with_gradients: bool = False


def linear_cross_entropy_of_shard(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, options: LossOptions
) -> Any:
    """Returns the cross entropy of `x · weightᵀ + bias`: `[.., in]`, `[classes/n, in]`, `[..]` `-> []`, or `[..]`: I.

    With the option `entropy` a pair: the cross entropy, and the entropy of `softmax(x · weightᵀ + bias)`, `[..]` each.
    Compilers, programs that all ranks share, transforms of `torch.func` and tensors that hold a local one get the
    linear function and the loss of its logits.
    """
    with_gradients = torch.is_grad_enabled() and not options.by_token
    operands = (x, weight, bias, target, options._replace(with_gradients=with_gradients))
    if transforming() or is_dynamo_compiling() or holds_local(x, weight, target) or in_one_program(x):
        return _by_operators(*operands)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):  # which knows no meta device
        dtype = torch.get_autocast_dtype(x.device.type)
        operands = (x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), *operands[3:])
    return _LinearCrossEntropy.apply(*operands)


class _LinearCrossEntropy(torch.autograd.Function):
    splits_backward = True  # for pipeline/run/halves.py: the second half has the sum that the first half left

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: LossOptions,
    ) -> Any:
        need = ctx.needs_input_grad[:3]
        gradients = _Gradients(weight, bias, need) if options.with_gradients and any(need) else None
        full, columns = _gathered(x, options), []
        for chunk in _chunks(full, weight, bias, target, options):
            columns.append(_loss_of(chunk, options))
            if gradients is not None:
                gradients.add(chunk, columns[-1][1], None, options)
            del chunk  # before the logits of the next one are computed
        loss, log, *entropy = (_joined(column) for column in zip(*columns))
        ctx.options, ctx.gradients = options, gradients
        ctx.save_for_backward(x, weight, bias, target, log, *entropy)
        if options.entropy:
            return loss.view(target.shape), entropy[0].view(target.shape)
        return loss.view(target.shape) if options.by_token else loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, grad_entropy: torch.Tensor | None = None) -> Any:
        x, weight, bias, target, *columns = ctx.saved_tensors
        options, need = ctx.options, ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph=True
            # Other tensors with the history of these, so that no path from one operand to another is followed.
            aliases: list[Any] = [None if t is None else t.view_as(t) for t in (x, weight, bias)]
            loss = _by_operators(aliases[0], aliases[1], aliases[2], target, options)
            wanted = [alias for alias, is_needed in zip(aliases, need) if is_needed]
            grads = (grad, grad_entropy) if options.entropy else grad
            found = iter(torch.autograd.grad(loss, wanted, grads, create_graph=True))
            return *(next(found) if is_needed else None for is_needed in need), None, None
        if ctx.gradients is not None and ctx.gradients.has(need):
            return *ctx.gradients.take(need, grad, x, options), None, None
        gradients, full = _Gradients(weight, bias, need), _gathered(x, options)  # of tokens, or a second backward
        columns.insert(1, grad.expand(target.shape).flatten())
        if grad_entropy is not None:
            columns.append(grad_entropy.flatten())
        rows = zip(*(_split(column, _chunk_size(full, weight, options)) for column in columns))
        for chunk in _chunks(full, weight, bias, target, options):
            log, factor, *entropy = next(rows)
            gradients.add(chunk, log, factor, options, *entropy)
            del chunk
        return *gradients.take(need, None, x, options), None, None


def _by_operators(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    options: LossOptions,
) -> Any:
    """Composes the loss of operators, which hold all logits: for `torch.func`, compilers and second derivatives."""
    communicator, dtype, dim = options.communicator, options.reduce_dtype, options.sequence_dim
    if dim is None:
        full = spmd.convert(x, communicator, src=I, dst=R, reduce_dtype=dtype)
    else:
        full = spmd.all_gather(x, communicator, src=S(dim), dst=R, reduce_dtype=dtype)
    logits = F.linear(full, weight, bias)
    if options.vocabulary % communicator.size:
        logits = hide_padding(logits.clone(), options.vocabulary, communicator)
    losses = cross_entropy_of_shard(logits, target, communicator, options.smoothing, options.ignore_index)
    if options.entropy:
        return losses, entropy_of_shard(logits, communicator)
    if options.z_loss:
        log = log_sum_exp(wide(logits), -1, [communicator]).squeeze(-1)
        losses = losses + options.z_loss * log.square().masked_fill(target == options.ignore_index, 0.0)
    return losses if options.by_token else losses.sum()


class _Chunk(NamedTuple):
    """Tokens `[c, in]`, their logits `[c, classes/n]`, and where the targets' logits are `[c, 1]`, `[c]`, `[c]`."""

    x: torch.Tensor
    logits: torch.Tensor
    local: torch.Tensor
    elsewhere: torch.Tensor
    ignored: torch.Tensor


def _gathered(x: torch.Tensor, options: LossOptions) -> torch.Tensor:
    if options.sequence_dim is None:
        return x
    full: torch.Tensor = comm.all_gather(x, options.communicator, dim=options.sequence_dim)
    return full


def _chunk_size(x: torch.Tensor, weight: torch.Tensor, options: LossOptions) -> int:
    """Returns a number of tokens whose logits take about as much memory as all of `x`, and at least 512."""
    tokens = max(x.shape[:-1].numel(), 1)
    if _seen_whole(x):
        return tokens
    if options.chunk_size is not None:
        return options.chunk_size
    return min(tokens, max(_FEWEST, tokens * x.shape[-1] // max(weight.shape[0], 1)))


def _split(x: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
    return x.split(size) if size < len(x) else [x]


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(pieces)) if len(pieces) > 1 else pieces[0]


def _chunks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, options: LossOptions
) -> Iterator[_Chunk]:
    communicator = options.communicator
    local, elsewhere = local_positions(target.flatten(), weight.shape[0], communicator)
    flat = (x.reshape(-1, x.shape[-1]), local.unsqueeze(-1), elsewhere, target.flatten() == options.ignore_index)
    size = _chunk_size(x, weight, options)
    for tokens, *positions in zip(*(_split(t, size) for t in flat)):
        logits = F.linear(tokens, weight, bias)
        if options.vocabulary % communicator.size:
            hide_padding(logits, options.vocabulary, communicator)
        yield _Chunk(tokens, logits, *positions)
        del logits


def _loss_of(chunk: _Chunk, options: LossOptions) -> tuple[torch.Tensor, ...]:
    """Returns the losses and the log-sum-exps of a chunk, `[c]`, and with that option the entropies."""
    logits, communicator = chunk.logits, options.communicator
    dtype = torch.promote_types(logits.dtype, torch.float32)
    highest = comm.all_reduce(logits.amax(-1), communicator, op="max").to(dtype)
    if active() is not None:
        spmd.assert_type(highest, {communicator: R})
    predicted = logits.gather(-1, chunk.local).squeeze(-1).to(dtype).sub_(highest).masked_fill_(chunk.elsewhere, 0.0)
    if options.entropy:
        sums = [predicted, *_entropy_sums(logits, highest)]
    else:
        sums = [predicted, *_sums_by_pieces(logits, highest, options.smoothing)]
    stacked = torch.stack([spmd.trust(summand, communicator, P) for summand in sums])
    stacked = comm.all_reduce(stacked, communicator, out=stacked)
    log = highest + stacked[-1].log()
    loss = _loss(stacked, options.smoothing)
    if options.z_loss:
        loss = loss + options.z_loss * log.square()
    loss = loss.masked_fill(chunk.ignored, 0.0)
    return (loss, log, stacked[-1].log() - stacked[1] / stacked[-1]) if options.entropy else (loss, log)


def _entropy_sums(logits: torch.Tensor, highest: torch.Tensor) -> list[torch.Tensor]:
    """Returns this rank's Σ exp(z - m) (z - m) and Σ exp(z - m), `[c]`."""
    sums = []
    for piece, top in _pieces(_piece_size(logits), logits, highest):
        shifted = (piece - top.unsqueeze(-1)).clamp_(min=torch.finfo(top.dtype).min)  # -inf: 0 exp(-inf), not NaN
        powers = shifted.exp()
        sums.append((shifted.mul_(powers).sum(-1), powers.sum(-1)))
    return [_joined(column) for column in zip(*sums)]


def _write_entropy_gradient(
    dz: torch.Tensor,
    logits: torch.Tensor,
    log: torch.Tensor,
    weight: torch.Tensor,
    local: torch.Tensor,
    at_target: torch.Tensor,
    entropy: torch.Tensor,
    grad_entropy: torch.Tensor,
) -> None:
    """Writes the gradients of losses with a weight and of entropies: p (weight - grad (log p + H)) - weight onehot."""
    log_p = (logits - log).clamp_(min=LOWEST)
    factor = weight - grad_entropy * (log_p + entropy)
    dz.copy_(log_p.exp_().mul_(factor).scatter_add_(-1, local, at_target * weight))


class _Gradients:
    """Sums of dX, dW and db over chunks, for those that are needed; dW in fp32 or better."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, need: Sequence[bool]) -> None:
        self.weight, self.bias, self.need = weight, bias, need
        self.of_tokens: list[torch.Tensor] = []
        self.of_weight: torch.Tensor | None = None
        self.of_bias: torch.Tensor | None = None

    def add(
        self,
        chunk: _Chunk,
        log: torch.Tensor,
        factor: torch.Tensor | None,
        options: LossOptions,
        *entropy: torch.Tensor,
    ) -> None:
        """Adds the gradients of a chunk's losses, times `factor` `[c]`, and overwrites its logits.

        `entropy`: the tokens' entropies and their gradients, `[c]` each.

        dz = a exp(z - lse) - (1 - s) onehot - s / K,  with a = 1 + 2 z_loss lse
        """
        slope = 1 + 2 * options.z_loss * log if options.z_loss else torch.ones_like(log)
        weight = (slope if factor is None else slope * factor).masked_fill(chunk.ignored, 0.0)
        share = options.smoothing * options.vocabulary / max(options.vocabulary - 1, 1)
        at_target = (-(1 - share) / slope).masked_fill(chunk.elsewhere, 0.0)
        per_column = [(share / options.vocabulary / slope).unsqueeze(-1)] if share else []
        operands = (log.unsqueeze(-1), weight.unsqueeze(-1), chunk.local, at_target.unsqueeze(-1), *per_column)
        logits = chunk.logits
        if entropy:
            dz = torch.empty_like(logits) if _seen_whole(logits) else logits.detach()
            more = (column.unsqueeze(-1) for column in entropy)
            for pieces in _pieces(_piece_size(logits), dz, logits.detach(), *operands, *more):
                _write_entropy_gradient(*pieces)
        elif _seen_whole(logits):
            dz = _gradient(None, logits, *operands).to(logits.dtype)
        else:
            dz = logits.detach()
            for out, *piece in _pieces(_piece_size(logits), dz, logits.detach(), *operands):
                _gradient(out, *piece)
        if self.need[0]:
            self.of_tokens.append(dz.mm(self.weight))
        if self.need[1]:
            wide_dtype = torch.promote_types(dz.dtype, torch.float32)
            if self.of_weight is not None and wide_dtype == dz.dtype:
                self.of_weight.addmm_(dz.t(), chunk.x)
            else:
                divisor = _FLOAT16_SCALE if dz.dtype == torch.float16 else 1.0
                product = dz.t().mm(chunk.x / divisor if divisor != 1.0 else chunk.x).to(wide_dtype)
                product = product * divisor if divisor != 1.0 else product
                self.of_weight = product if self.of_weight is None else self.of_weight.add_(product)
        if self.need[2]:
            summed = dz.sum(0, dtype=torch.promote_types(dz.dtype, torch.float32))
            self.of_bias = summed if self.of_bias is None else self.of_bias.add_(summed)

    def has(self, need: Sequence[bool]) -> bool:
        """Returns whether all needed sums are there: a pipeline's backward in halves takes some, and later others."""
        present = (self.of_tokens, self.of_weight is not None, self.of_bias is not None)
        return all(is_there for is_there, is_needed in zip(present, need) if is_needed)

    def take(
        self, need: Sequence[bool], factor: torch.Tensor | None, x: torch.Tensor, options: LossOptions
    ) -> list[torch.Tensor | None]:
        """Returns the gradients times `factor`, and drops them; that of the input is reduced over the ranks."""
        reducing: Any = None
        if need[0]:
            grad_x = _joined(self.of_tokens)
            if active() is None:  # a checker runs backward more than once
                self.of_tokens.clear()
            shape = list(x.shape)
            if options.sequence_dim is not None:
                shape[options.sequence_dim] *= options.communicator.size
            grad_x = grad_x.view(shape)
            grad_x = _times(grad_x, factor)
            dim, dtype = options.sequence_dim, options.reduce_dtype
            communicator = options.communicator
            if dim is None:
                reducing = comm.all_reduce(grad_x, communicator, reduce_dtype=dtype, out=grad_x, async_op=True)
            else:
                reducing = comm.reduce_scatter(grad_x, communicator, dim=dim, reduce_dtype=dtype, async_op=True)
        found: list[torch.Tensor | None] = []
        of_parameters = ((self.of_weight, self.weight), (self.of_bias, self.bias))
        for is_needed, (total, parameter) in zip(need[1:], of_parameters):
            if total is None or parameter is None or not is_needed:
                found.append(None)
            else:
                found.append(_times(total, factor).to(parameter.dtype))
        if active() is None:
            self.of_weight = None if need[1] else self.of_weight
            self.of_bias = None if need[2] else self.of_bias
        return [None if reducing is None else reducing.wait(), *found]


def _times(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """Returns the product with a number; outside of checks in the memory of `x`."""
    if factor is None:
        return x
    return x * factor if active() is not None else x.mul_(factor)

"""Functions of one rank's shard along a dim that torch's functions need all of: what emitted programs call by name.

Each takes the arguments of the function that it stands for, and where it communicates the axis over which the dim is
sharded. They are made of typed operators, which the checker follows as it does any program.

embedding           rows of the table on different ranks: partial sums of the lookups, none sent
cross_entropy       classes on different ranks; the logits are never gathered
softmax, norms      the ranks' sums (and maximum) are reduced; two passes, never E[x^2] - E[x]^2
dropout, attention  masks from this rank's own random stream
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm, spmd
from ..comm.rank_numbers import concrete
from ..parallel_layers.loss_functions import parallel_cross_entropy
from ..spmd import P, R, S, V
from ..spmd.random import TENSOR_PARALLEL, streams
from ..spmd.watching import active

__all__ = [
    "batch_norm",
    "batch_norm_of_channels",
    "cross_entropy",
    "dropout",
    "embedding",
    "group_norm",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
]


def embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *, axis: str) -> Tensor:
    """The rows that this rank holds of those looked up, zeros for the others: P.

    Args:
        input: R, ids in the whole table.
        weight: S(0), `[rows/n, width]`.
        padding_idx: from 0; this row gets no gradient.
    """
    count = weight.shape[0]
    own = spmd.trust(input - comm.communicator(axis).coordinate(input) * count, axis, V)
    elsewhere = (own < 0) | (own >= count)
    rows = F.embedding(own.masked_fill(elsewhere, 0), weight)
    if padding_idx is not None:
        rows = torch.where((input == padding_idx).unsqueeze(-1), rows.detach(), rows)
    return spmd.trust(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), axis, P)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    *,
    axis: str,
    classes: int,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of S(1) logits `[N, classes/n, ..]` (or `[classes/n]`) and R targets `[N, ..]`: I."""
    logits = input.movedim(1, -1) if input.dim() > 1 else input
    smoothing = label_smoothing * (classes - 1) / classes  # its own definition leaves the label out of the mean
    losses = parallel_cross_entropy(
        logits,
        target,
        smoothing,
        ignore_index=ignore_index,
        vocab_size=classes,
        tensor_model_parallel_group=axis,
    )
    if reduction != "none":
        losses = _wide(losses).sum()
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    return losses.to(input.dtype)


def _wide(x: Tensor) -> Tensor:
    """In a dtype in which sums of many values are precise enough."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _total(x: Tensor, dims: int | tuple[int, ...], axis: str) -> Tensor:
    """The sum over dims of which one is sharded, the same on all ranks, with dims of size 1 in their place."""
    return spmd.all_reduce(x.sum(dims, keepdim=True), axis, src=P, dst=R)


def _shifted(x: Tensor, dim: int, axis: str) -> Tensor:
    """`x` less its maximum over a sharded dim, which is a constant to autograd."""
    highest = comm.all_reduce(x.detach().amax(dim, keepdim=True), axis, op="max")
    if active() is not None:
        spmd.assert_type(highest, {axis: R})
    return x - highest


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, *, axis: str) -> Tensor:
    """Softmax over a dim of which `input` is this rank's shard: S(dim)."""
    x = input if dtype is None else input.to(dtype)
    powers = _shifted(_wide(x), dim, axis).exp()
    return (powers / _total(powers, dim, axis)).to(x.dtype)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, *, axis: str) -> Tensor:
    """The logarithm of the softmax over a dim of which `input` is this rank's shard: S(dim)."""
    x = input if dtype is None else input.to(dtype)
    shifted = _shifted(_wide(x), dim, axis)
    return (shifted - _total(shifted.exp(), dim, axis).log()).to(x.dtype)


# --- normalisations ---


def _moments(x: Tensor, dims: tuple[int, ...], count: int, axis: str) -> tuple[Tensor, Tensor, Tensor]:
    """`(x - mean, mean, variance)` over `count` values on all ranks."""
    mean = _total(x, dims, axis) / count
    centred = x - mean
    return centred, mean, _total(centred.square(), dims, axis) / count


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, behind: int = 0) -> Tensor:
    """`y * weight + bias`, which have `behind` dims less than `y` at the end."""
    ones = (1,) * behind
    y = y if weight is None else y * weight.view(*weight.shape, *ones)
    y = y if bias is None else y + bias.view(*bias.shape, *ones)
    return y.to(dtype)


def layer_norm(
    input: Tensor,
    dims: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    axis: str,
    count: int,
) -> Tensor:
    """Layer norm over the last `dims` dims, `count` values in the whole, one of which is sharded: as `input` is."""
    centred, _, variance = _moments(_wide(input), tuple(range(-dims, 0)), count, axis)
    return _scaled(centred * (variance + eps).rsqrt(), weight, bias, input.dtype)


def rms_norm(
    input: Tensor, dims: int, weight: Tensor | None = None, eps: float | None = None, *, axis: str, count: int
) -> Tensor:
    """RMS norm over the last `dims` dims, `count` values in the whole, one of which is sharded: as `input` is."""
    x = _wide(input)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    squares = _total(x.square(), tuple(range(-dims, 0)), axis) / count
    return _scaled(x * (squares + eps).rsqrt(), weight, None, input.dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    axis: str,
    count: int,
) -> Tensor:
    """Group norm where each rank has a part of every group, of `count` values in the whole: sharded like `input`.

    `input` is S(1, stride=num_groups), or sharded on a dim behind the channels.
    """
    x = _wide(input)
    x = x.unsqueeze(1) if num_groups == 1 else x.unflatten(1, (num_groups, -1))
    centred, _, variance = _moments(x, tuple(range(2, x.dim())), count, axis)
    y = (centred * (variance + eps).rsqrt()).flatten(1, 2)
    return _scaled(y, weight, bias, input.dtype, y.dim() - 2)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    axis: str,
    count: int,
) -> Tensor:
    """Batch norm in training, where samples or places are sharded, of `count` values a channel: sharded like `input`.

    Running statistics are those of all ranks, the same on each.
    """
    x = _wide(input)
    centred, mean, variance = _moments(x, (0, *range(2, x.dim())), count, axis)
    _move(running_mean, mean.flatten(), momentum)
    _move(running_var, variance.flatten() * (count / (count - 1)), momentum)
    return _scaled(centred * (variance + eps).rsqrt(), weight, bias, input.dtype, x.dim() - 2)


def batch_norm_of_channels(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    axis: str,
) -> Tensor:
    """Batch norm in training of S(1) channels, whose running statistics are whole on every rank: S(1).

    The ranks' new statistics, two numbers a channel, are gathered.
    """
    dims = (0, *range(2, input.dim()))
    with torch.no_grad():
        own = torch.stack((_wide(input).mean(dims), _wide(input).var(dims)))
        both = spmd.all_gather(own, axis, src=S(1), dst=R)
    _move(running_mean, both[0], momentum)
    _move(running_var, both[1], momentum)
    return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)


@torch.no_grad()
def _move(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.detach().to(running.dtype), alpha=momentum)


# --- random numbers ---


def _with_own_numbers(alike: str | None, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """A call that draws from this rank's own stream; torch's own generator, of whole values, stays where it is.

    Where nobody seeded the stream (`spmd.random.manual_seed`), it begins at the seed of torch's own generator and this
    rank's number, so that units differ too.

    Args:
        alike: part of tp ("tp/2") along which the ranks draw the same numbers, from a stream of their own.
    """
    own, name = streams(), f"{TENSOR_PARALLEL} {alike}" if alike else TENSOR_PARALLEL
    if name not in own.get_states():
        first = concrete(comm.communicator(alike).ranks[0] if alike else comm.rank("world"))
        number = 1 if alike is None else 2 if "/" in alike else 3  # of the stream: no two begin alike
        own.add(name, torch.initial_seed() % 2**62 + 2718 * number + first)
    with own.fork(name):
        return function(*args, **kwargs)


def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, alike: str | None = None
) -> Tensor:
    """Dropout of a shard, whose mask is another one on every rank, but for those along `alike`."""
    return _with_own_numbers(alike, F.dropout, input, p, training, inplace)


def scaled_dot_product_attention(*args: Any, alike: str | None = None, **kwargs: Any) -> Tensor:
    """Attention with dropout of a shard of the batch, the heads or the queries; masks as those of `dropout`."""
    return _with_own_numbers(alike, F.scaled_dot_product_attention, *args, **kwargs)

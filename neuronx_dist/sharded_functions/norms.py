"""Layer, RMS, group and batch norm over dims of which each rank has a shard, of any size.

    mean_r, M_r = Σ (x_r - mean_r)^2                          on rank r, of n_r elements
    mean = Σ n_r mean_r / n                                   from (mean_r, M_r) of all ranks: one all-gather
    M = Σ M_r + Σ n_r (mean_r - mean)^2                       backward: one all-reduce of the gradients of mean and M

Never `E[x^2] - E[x]^2`, which has no digits left far from zero. The mean of squares of RMS norm is one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import comm, spmd
from ..comm.context import AxisLike
from ..spmd import I, P, R, S, V
from ..spmd.local_code import on_own_shard
from .softmax import wide

__all__ = [
    "affine",
    "batch_norm",
    "batch_norm_of_channels",
    "for_shards",
    "group_norm",
    "layer_norm",
    "merged_moments",
    "moments",
    "rms_norm",
    "scaled_by_rms",
    "standardised",
]

Parts = Sequence[tuple[AxisLike, Sequence[int]]]


def moments(x: Tensor, dims: tuple[int, ...], parts: Parts) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared differences over `dims`, which keep size 1; one gather for each axis: I.

    Args:
        parts: `(axis, counts)` of each axis that shards some of the dims, one after the other: how many elements each
            of its ranks has of one result, those of the axes before counted on all their ranks.
    """
    count = prod(x.shape[d] for d in dims)

    def of_shard(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean(dims, keepdim=True) if count else x.sum(dims, keepdim=True)
        return mean, (x - mean).square().sum(dims, keepdim=True)

    mean, squares = on_own_shard(of_shard, {axis: V for axis, _ in parts})(x)
    for axis, counts in parts:
        mean, squares = merged_moments(mean, squares, x.new_tensor(counts).view(-1, *[1] * x.dim()), axis)
    return mean, squares


def merged_moments(mean: Tensor, squares: Tensor, counts: Tensor, axis: AxisLike) -> tuple[Tensor, Tensor]:
    """Merges means and sums of squared differences of the ranks' elements, `counts[rank]` of them: I."""
    pairs = spmd.all_gather(torch.stack((mean, squares)), axis, src=V, dst=I)
    means = pairs[:, 0]
    mean = (means * counts).sum(0) / counts.sum(0).clamp(min=1)
    return mean, pairs[:, 1].sum(0) + ((means - mean).square() * counts).sum(0)


def for_shards(mean: Tensor, squares: Tensor, axes: Iterable[AxisLike]) -> tuple[Tensor, Tensor]:
    """Converts moments, equal on all ranks, for use on each rank's shard: R."""
    both = torch.stack((mean, squares))
    for axis in axes:
        both = spmd.convert(both, axis, src=I, dst=R)
    mean, squares = both.unbind(0)
    return mean, squares


def standardised(x: Tensor, mean: Tensor, squares: Tensor, axes: Iterable[AxisLike], count: int, eps: float) -> Tensor:
    """Returns `(x - mean) / sqrt(variance + eps)` of a shard, from moments (I) of `count` elements."""
    mean, squares = for_shards(mean, squares, axes)
    return (x - mean) * torch.rsqrt(squares / max(count, 1) + eps)


def scaled_by_rms(x: Tensor, dims: tuple[int, ...], axes: Iterable[AxisLike], count: int, eps: float | None) -> Tensor:
    """Returns `x / sqrt(mean of squares + eps)`, over `count` elements in all; one all-reduce for each axis."""
    squares = x.square().sum(dims, keepdim=True)
    for axis in axes:
        squares = spmd.all_reduce(squares, axis, src=P, dst=R)
    return x * torch.rsqrt(squares / count + (torch.finfo(x.dtype).eps if eps is None else eps))


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, behind: int = 0) -> Tensor:
    """Returns `y * weight + bias` in `dtype`; both have `behind` dims less than `y` at the end."""
    ones = (1,) * behind
    y = y if weight is None else y * weight.view(*weight.shape, *ones)
    y = y if bias is None else y + bias.view(*bias.shape, *ones)
    return y.to(dtype)


# --- torch's functions, of a rank's shard of equal size: what emitted programs call


def _equal_parts(count: int, axis: AxisLike) -> Parts:
    """The shards of `count` elements, as many on each rank."""
    size = len(comm.communicator(axis).ranks)
    return [(axis, (count // size,) * size)]


def layer_norm(
    input: Tensor,
    dims: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    axis: AxisLike,
    count: int,
) -> Tensor:
    """Layer norm over the last `dims` dims, one of them sharded, of `count` elements in all: sharded like `input`."""
    x = wide(input)
    statistics = moments(x, tuple(range(-dims, 0)), _equal_parts(count, axis))
    y = standardised(x, *statistics, (axis,), count, eps)
    return affine(y, weight, bias, input.dtype)


def rms_norm(
    input: Tensor, dims: int, weight: Tensor | None = None, eps: float | None = None, *, axis: AxisLike, count: int
) -> Tensor:
    """RMS norm over the last `dims` dims, one of them sharded, of `count` elements in all: sharded like `input`."""
    return affine(scaled_by_rms(wide(input), tuple(range(-dims, 0)), (axis,), count, eps), weight, None, input.dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    axis: AxisLike,
    count: int,
) -> Tensor:
    """Group norm where each rank has a part of every group, of `count` elements in all: sharded like `input`.

    `input` is S(1, stride=num_groups), or sharded on a dim behind the channels.
    """
    x = wide(input)
    x = x.unsqueeze(1) if num_groups == 1 else x.unflatten(1, (num_groups, -1))
    statistics = moments(x, tuple(range(2, x.dim())), _equal_parts(count, axis))
    y = standardised(x, *statistics, (axis,), count, eps).flatten(1, 2)
    return affine(y, weight, bias, input.dtype, y.dim() - 2)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    axis: AxisLike | None,
    count: int,
    units: AxisLike | None = None,
) -> Tensor:
    """Batch norm in training, where samples or places are sharded, `count` elements a channel: sharded like `input`.

    Running statistics are those of all ranks, the same on each.

    Args:
        axis: shards the samples or places; None: each rank has all of a unit.
        units: an axis along which ranks have other samples, `count` of each: statistics are over all; None: none.
    """
    parts = [] if axis is None else _equal_parts(count, axis)
    return _batch_norm(input, running_mean, running_var, weight, bias, momentum, eps, parts, count, units)


def batch_norm_of_channels(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    axis: AxisLike,
    units: AxisLike | None = None,
) -> Tensor:
    """Batch norm in training of S(1) channels, whose running statistics are whole on every rank: S(1).

    The ranks' new statistics, two numbers a channel, are gathered. `units`: as in `batch_norm`.
    """
    if units is not None:
        count = input.numel() // input.shape[1]
        return _batch_norm(input, running_mean, running_var, weight, bias, momentum, eps, [], count, units, axis)
    dims = (0, *range(2, input.dim()))
    with torch.no_grad():
        _update_channels(running_mean, running_var, wide(input).mean(dims), wide(input).var(dims), momentum, axis)
    return F.batch_norm(input, None, None, weight, bias, True, momentum, eps)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    parts: Parts,
    count: int,
    units: AxisLike | None,
    channels: AxisLike | None = None,
) -> Tensor:
    """Batch norm over `parts` and `units`; `channels`: the axis that shards them, and no running statistics."""
    size = 1 if units is None else len(comm.communicator(units).ranks)
    if units is not None and size > 1:
        parts, count = [*parts, (units, (count,) * size)], count * size
    x = wide(input)
    mean, squares = moments(x, (0, *range(2, x.dim())), parts)
    _update_channels(running_mean, running_var, mean.flatten(), squares.flatten() / (count - 1), momentum, channels)
    y = standardised(x, mean, squares, [axis for axis, _ in parts], count, eps)
    return affine(y, weight, bias, input.dtype, x.dim() - 2)


@torch.no_grad()
def _update_channels(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    channels: AxisLike | None,
) -> None:
    """Updates running statistics; `channels`: the axis that shards the new ones, and not the running ones."""
    if channels is not None:
        mean, variance = spmd.all_gather(torch.stack((mean, variance)), channels, src=S(1), dst=R).unbind(0)
    _update(running_mean, mean, momentum)
    _update(running_var, variance, momentum)


@torch.no_grad()
def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    """Moves running statistics towards this batch's value."""
    if running is not None:
        running.mul_(1 - momentum).add_(value.detach().to(running.dtype), alpha=momentum)

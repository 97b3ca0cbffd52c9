"""Softmax, log-softmax, log-sum-exp and entropy over a dim of which each rank has a shard, of any size.

    m_r = max x_r;  s_r = Σ exp(x_r - m_r)                    on rank r
    m = max m_r;    s = Σ_r s_r exp(m_r - m)                  from (m_r, s_r) of all ranks: one all-gather
    softmax(x_r) = exp(x_r - m_r) exp(m_r - m) / s            backward: one all-reduce, of Σ y_r dy_r

An all-reduce of the maximum and another of the sum would wait twice; over n ranks the gather has n/2 times their bytes,
of two numbers a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from .. import spmd
from ..comm.context import AxisLike
from ..comm.verbs.transformed_tensors import transforming
from ..spmd import I, P, R, S, V
from ..spmd.local_code import on_own_shard
from ..spmd.watching import active

__all__ = ["LOWEST", "entropy_of_shard", "log_softmax", "log_sum_exp", "may_be_one_node", "softmax", "wide"]

Dims = int | tuple[int, ...]
LOWEST = -1000.0  # a log-probability whose exponential is 0: with -inf, or the lowest number, its gradient is 0 * inf


def wide(x: torch.Tensor) -> torch.Tensor:
    """Returns half precision as float32, in which torch's kernels sum; other dtypes as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def may_be_one_node(x: torch.Tensor) -> bool:
    """Returns whether a function of `x` needs a graph, into which no checker, transform or compiler has to see."""
    return x.requires_grad and active() is None and not transforming() and not is_dynamo_compiling()


def _exponentials(x: torch.Tensor, dims: Dims) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns `(x - m, exp(x - m), m, Σ exp(x - m))` of this rank's shard, with a constant m.

    m is the lowest finite number in place of a maximum of -inf, or of an empty shard: no -inf is subtracted from -inf.
    """
    lowest = torch.finfo(x.dtype).min
    with torch.no_grad():
        x_value = x.detach()  # forward-mode AD has tangents under no_grad, too
        largest = x_value.amax(dims, keepdim=True) if x.numel() else x_value.sum(dims, keepdim=True) + lowest
        largest = largest.clamp(min=lowest)
    shifted = x - largest
    powers = shifted.exp()
    return shifted, powers, largest, powers.sum(dims, keepdim=True)


def _merged(largest: torch.Tensor, total: torch.Tensor, axis: AxisLike) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges `(m, Σ exp(x - m))` of the ranks: I, the first of them without a gradient."""
    pairs = spmd.all_gather(torch.stack((largest, total)), axis, src=V, dst=I)
    largest_by_rank, totals = pairs.unbind(1)
    largest_by_rank = largest_by_rank.detach()
    largest = largest_by_rank.amax(0)
    return largest, (totals * (largest_by_rank - largest).exp()).sum(0)


def _with_total(x: torch.Tensor, dim: int, axis: AxisLike) -> tuple[torch.Tensor, ...]:
    """Returns `(x - m_r, exp(x - m_r), m_r - m, Σ exp(x - m) of all ranks)`, the last of them R."""
    shifted, powers, local_largest, total = on_own_shard(_exponentials, {axis: V})(x, dim)
    largest, total = _merged(local_largest, total, axis)
    return shifted, powers, local_largest - largest, spmd.convert(total, axis, src=I, dst=R)


def _softmax(x: torch.Tensor, dim: int, axis: AxisLike) -> torch.Tensor:
    _, powers, difference, total = _with_total(x, dim, axis)
    return on_own_shard(lambda: powers * (difference.exp() / total), {axis: S(dim)})()


def _log_softmax(x: torch.Tensor, dim: int, axis: AxisLike) -> torch.Tensor:
    shifted, _, difference, total = _with_total(x, dim, axis)
    return on_own_shard(lambda: shifted + (difference - total.log()), {axis: S(dim)})()


class _OneNode(torch.autograd.Function):
    """Softmax or log-softmax as one node of the graph, which saves the result alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, axis: AxisLike, logarithm: bool) -> torch.Tensor:
        shifted, powers, local_largest, total = _exponentials(x, dim)
        largest, total = _merged(local_largest, total, axis)
        difference = local_largest - largest
        y = shifted.add_(difference - total.log()) if logarithm else powers.mul_(difference.exp_().div_(total))
        ctx.save_for_backward(y)
        ctx.place = dim, axis, logarithm
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (y,) = ctx.saved_tensors
        dim, axis, logarithm = ctx.place
        summands = (grad if logarithm else y * grad).sum(dim, keepdim=True)
        total = spmd.all_reduce(summands, axis, src=P, dst=R)
        return (grad - y.exp() * total if logarithm else y * (grad - total)), None, None, None


def _computed(input: torch.Tensor, dim: int, dtype: torch.dtype | None, axis: AxisLike, log: bool) -> torch.Tensor:
    if getattr(type(input), "is_deferred", False):  # hf.swap's logits, which an autograd function takes for values
        input = input.view(input.shape)
    x = input if dtype is None else input.to(dtype)
    y = wide(x)
    if may_be_one_node(y):
        return _OneNode.apply(y, dim, axis, log).to(x.dtype)
    return (_log_softmax if log else _softmax)(y, dim, axis).to(x.dtype)


def softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, axis: AxisLike) -> torch.Tensor:
    """Returns this rank's shard of the softmax over a dim of which `input` is a shard: S(dim)."""
    return _computed(input, dim, dtype, axis, False)


def log_softmax(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None, *, axis: AxisLike) -> torch.Tensor:
    """Returns this rank's shard of the log-softmax over a dim of which `input` is a shard: S(dim)."""
    return _computed(input, dim, dtype, axis, True)


def entropy_of_shard(logits: torch.Tensor, axis: AxisLike) -> torch.Tensor:
    """Returns the entropy of the softmax of each row, `[.., classes/n] -> [..]`, in fp32 or better: I."""
    log_p = log_softmax(wide(logits), -1, axis=axis)

    def summands() -> torch.Tensor:
        return -(log_p.exp() * log_p.clamp(min=LOWEST)).sum(-1)  # p log p is 0 where p is 0

    return spmd.all_reduce(on_own_shard(summands, {axis: P})(), axis, src=P, dst=I)


def log_sum_exp(x: torch.Tensor, dims: Dims, axes: Sequence[AxisLike]) -> torch.Tensor:
    """Returns the log-sum-exp over dims that are sharded over `axes`, one gather for each; dims keep size 1: I."""
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    _, _, largest, total = on_own_shard(_exponentials, dict.fromkeys(axes, V))(x, dims)
    for axis in axes:
        largest, total = _merged(largest, total, axis)
    return torch.where(largest.isinf(), largest, total.log() + largest)  # of nothing but -inf: -inf

"""The maximum and the minimum over dims of a tensor and over groups of ranks. Every rank takes part, with any shard."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ... import comm
from ...comm import Communicator

__all__ = ["extreme"]


class _Extreme(torch.autograd.Function):
    """Maximum (minimum) over dims and groups; all elements equal to it share the gradient evenly."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dims: tuple[int, ...], groups: tuple[Communicator, ...], op: str
    ) -> torch.Tensor:
        if dims and not prod(x.shape[d] for d in dims):
            shape = [1 if d in dims else size for d, size in enumerate(x.shape)]
            y = x.new_full(shape, _identity(x.dtype, op))
        else:
            y = (x.amax if op == "max" else x.amin)(dims, keepdim=True) if dims else x.clone()
        for group in groups:
            y = comm.all_reduce(y, group, op=op)
        if ctx.needs_input_grad[0]:
            mask = (x == y).to(x.dtype)
            count = mask.sum(dims, keepdim=True) if dims else mask
            for group in groups:
                count = comm.all_reduce(count, group)
            ctx.save_for_backward(mask / count)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (share,) = ctx.saved_tensors
        return grad * share, None, None, None


def _identity(dtype: torch.dtype, op: str) -> float:
    """Identity element of max or min for this dtype."""
    if dtype is torch.bool:
        return op == "min"
    info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    if dtype.is_floating_point:
        return float("-inf") if op == "max" else float("inf")
    return info.min if op == "max" else info.max


def extreme(x: torch.Tensor, dims: tuple[int, ...], groups: tuple[Communicator, ...], op: str) -> torch.Tensor:
    """Returns the extreme over `dims`, which stay with size 1, and over the ranks of `groups`; `op`: "max" or "min"."""
    result: torch.Tensor = _Extreme.apply(x, dims, groups, op)
    return result

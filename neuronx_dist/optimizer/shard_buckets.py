"""Buckets of shards on the wire: a reduce-scatter of gradients to masters, an all-gather of masters to parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from .. import comm, spmd
from ..gradients.buckets import presence
from ..gradients.in_backward import Bucket
from ..spmd.watching import active
from .shards import ParameterShard

__all__ = [
    "finish_all_gather",
    "finish_reduce_scatter",
    "gradient_bucket",
    "start_all_gather",
    "start_reduce_scatter",
]


def start_reduce_scatter(bucket: list[ParameterShard]) -> Any:
    """Starts the sum of a bucket's gradients, of which each rank gets its rows; returns the handle."""
    first = bucket[0]
    grads = [shard.gradient.tensor for shard in bucket]
    parts = [
        first.param.new_zeros(shard.degree, shard.columns, dtype=shard.grad_dtype)
        if grad is None
        else shard.split(grad).to(shard.grad_dtype)
        for shard, grad in zip(bucket, grads)
    ]
    flags = presence([grad is not None for grad in grads], parts[0], first.group)
    parts.append(flags.expand(first.degree, -1))
    if _scales_first(first):
        parts = list(torch._foreach_mul(parts, first.scale))
    return comm.reduce_scatter(parts, first.group, async_op=True)


def finish_reduce_scatter(bucket: list[ParameterShard], handle: Any) -> None:
    """Gives each master the mean of its gradients, in its dtype; None if no rank has one."""
    first, (*parts, flags) = bucket[0], handle.wait()
    if not _scales_first(first):
        torch._foreach_mul_(parts, first.scale)
    for shard, part, flag in zip(bucket, parts, spmd.local(flags)[0]):
        # Waits for the device where a gradient is missing, and only there.
        is_somewhere = shard.gradient.tensor is not None or bool(flag > 0)
        shard.master.grad = part.view(shard.shape).to(shard.master.dtype) if is_somewhere else None


def start_all_gather(bucket: list[ParameterShard]) -> Any:
    """Starts to gather a bucket's masters, in the dtype of their parameters; returns the handle."""
    masters = [shard.master.detach().reshape(1, -1).to(shard.param.dtype) for shard in bucket]
    return comm.all_gather(masters, bucket[0].group, out=[shard.rows for shard in bucket], async_op=True)


def finish_all_gather(bucket: list[ParameterShard], handle: Any) -> None:
    """Sets the bucket's parameters."""
    for shard, block in zip(bucket, handle.wait()):
        shard.push(block)


def gradient_bucket(bucket: list[ParameterShard], in_backward: bool) -> Bucket:
    """A bucket that is reduce-scattered in backward, or after it."""
    return Bucket(
        [shard.gradient for shard in bucket],
        start=partial(start_reduce_scatter, bucket),
        finish=partial(finish_reduce_scatter, bucket),
        in_backward=in_backward,
    )


def _scales_first(shard: ParameterShard) -> bool:
    """Whether a gradient is divided before the sum: of fp16, which may overflow in it, and under a type check.

    A type check refuses the sum of what is equal on all ranks already. Afterwards there is less to divide.
    """
    return shard.grad_dtype == torch.float16 or active() is not None

"""Buckets of shards on the wire: a reduce-scatter of gradients to masters, an all-gather of masters to parameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import torch

from .. import comm, spmd
from ..gradients.buckets import BucketPlan, is_anywhere, presence
from ..gradients.in_backward import Bucket, is_late
from ..spmd.watching import active
from ..torch_internals.tensors import foreach_mul, foreach_mul_
from .shards import ParameterShard

__all__ = [
    "cut_buckets",
    "finish_all_gather",
    "finish_reduce_scatter",
    "gradient_bucket",
    "nbytes_of",
    "start_all_gather",
    "start_reduce_scatter",
]


def cut_buckets(
    shards: Sequence[ParameterShard], plan: BucketPlan, cap: int, *, in_backward: bool = False
) -> list[list[ParameterShard]]:
    """Shards in the buckets of a plan, of which two take `cap` bytes at most.

    Args:
        in_backward: put gradients that backward does not complete into separate buckets.
    """
    keys: list[Hashable] = [
        (
            *(shard.group, shard.replicas, shard.param.dtype, shard.grad_dtype, shard.param.device),
            in_backward and is_late(shard.gradient),
        )
        for shard in shards
    ]
    buckets = plan.buckets(keys, [shard.nbytes for shard in shards], cap // 2)
    return [[shards[index] for index in bucket] for bucket in buckets]


def nbytes_of(bucket: Sequence[ParameterShard]) -> int:
    """Size of a bucket's gradients on the wire."""
    return sum(shard.nbytes for shard in bucket)


def start_reduce_scatter(bucket: list[ParameterShard]) -> Any:
    """Starts the sum of a bucket's gradients, of which each rank gets its rows; returns the handle."""
    first = bucket[0]
    grads = [shard.own_grad for shard in bucket]
    parts = [
        first.param.new_zeros(shard.degree, shard.columns, dtype=shard.grad_dtype)
        if grad is None
        else shard.split(grad).to(shard.grad_dtype, copy=shard.degree == 1)
        for shard, grad in zip(bucket, grads)
    ]
    flags = presence([grad is not None for grad in grads], parts[0], first.group)
    parts.append(flags.expand(first.degree, -1))
    if _scales_first(first):
        parts = list(foreach_mul(parts, first.scale))
    return comm.reduce_scatter(parts, first.group, async_op=True)


def finish_reduce_scatter(bucket: list[ParameterShard], handle: Any) -> None:
    """Sets each master's gradient to the mean over the group, in the master's dtype; None if no rank has a gradient."""
    first = bucket[0]
    *parts, flags = reduced = handle.wait()
    if first.replicas.size > 1:
        comm.all_reduce(reduced, first.replicas, out=reduced)
    if not _scales_first(first):
        foreach_mul_(parts, first.scale)
    for shard, part, flag in zip(bucket, parts, spmd.local(flags)[0]):
        # Waits for the device where a gradient is missing, and only there.
        is_somewhere = shard.gradient.tensor is not None or is_anywhere(flag)
        if not part.numel():  # of an embedding table that is whole on another rank
            shard.master.grad = torch.zeros_like(shard.master) if is_somewhere else None
            continue
        shard.master.grad = part.view(shard.shape).to(shard.master.dtype) if is_somewhere else None


def start_all_gather(bucket: list[ParameterShard]) -> Any:
    """Starts to gather a bucket's masters, in the dtype of their parameters; returns the handle."""
    masters = [shard.master.detach().reshape(1, -1).to(shard.param.dtype) for shard in bucket]
    return comm.all_gather(masters, bucket[0].group, out=[shard.rows for shard in bucket], async_op=True)


def finish_all_gather(bucket: list[ParameterShard], handle: Any) -> None:
    """Sets the bucket's parameters."""
    for shard, block in zip(bucket, handle.wait()):
        shard.push(block)


def gradient_bucket(bucket: list[ParameterShard]) -> Bucket:
    """A bucket that is reduce-scattered in backward, or after it where backward does not complete its gradients."""
    return Bucket(
        [shard.gradient for shard in bucket],
        start=partial(start_reduce_scatter, bucket),
        finish=partial(finish_reduce_scatter, bucket),
        in_backward=not is_late(bucket[0].gradient),
    )


def _scales_first(shard: ParameterShard) -> bool:
    """Returns whether a gradient is divided before the sum: in fp16, whose sum may overflow, and under a type check.

    A type check refuses the sum of a value that is equal on all ranks. Otherwise the result is divided, which has only
    the rows of this rank.
    """
    return shard.grad_dtype == torch.float16 or active() is not None

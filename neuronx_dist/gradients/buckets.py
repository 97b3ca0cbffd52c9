"""Buckets: many tensors in a few large collectives.

A verb of `comm` takes the list of a bucket's tensors. Communication overlaps with the copies into and out of buckets.

Buckets are cut by the parameters alone (order, dtype, size), never by which gradients happen to be there, so that every
rank of a group cuts the same ones. A `BucketPlan` keeps them from step to step.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import torch

from .. import spmd
from ..comm import Communicator
from ..spmd import P
from ..spmd.watching import active
from ..torch_internals.fake_tensors import FakeTensor

__all__ = ["BucketPlan", "cap_in_bytes", "cut", "is_anywhere", "overlap", "presence"]

T = TypeVar("T")
W = TypeVar("W")


def cap_in_bytes(cap_mb: float | None, env: str, default_mb: float) -> int:
    """Bytes of a bucket: `cap_mb` if given and not 0, else the environment variable that NxD reads, else the default.

    Raises:
        ValueError: it is not positive.
    """
    megabytes = cap_mb or float(os.environ.get(env, default_mb))
    if megabytes <= 0:
        raise ValueError(f"bucket cap must be positive, got {megabytes} MB; without it (and {env}) it is {default_mb}")
    return int(megabytes * 2**20)


def cut(items: Iterable[T], key: Callable[[T], Hashable], nbytes: Callable[[T], int], cap: int) -> list[list[T]]:
    """Puts items of one key into buckets of at most `cap` bytes, in order; a larger item is a bucket alone."""
    open_buckets: dict[Hashable, tuple[list[T], int]] = {}
    buckets: list[list[T]] = []
    for item in items:
        item_key, size = key(item), nbytes(item)
        bucket, filled = open_buckets.get(item_key, ([], 0))
        if not bucket or filled + size > cap:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(item)
        open_buckets[item_key] = (bucket, filled + size)
    return buckets


class BucketPlan:
    """The buckets of a list of tensors: cut at the first use, then cached.

    The list is cut again when its tensors, a tensor's key or size, or the cap have changed.
    """

    def __init__(self) -> None:
        self._cut_by: tuple[list[Hashable], list[int], int] | None = None
        self._buckets: list[list[int]] = []

    def buckets(self, keys: list[Hashable], nbytes: list[int], cap: int) -> list[list[int]]:
        """Buckets of at most `cap` bytes, as numbers of tensors.

        Args:
            keys: of each tensor; only tensors of equal keys share a bucket.
            nbytes: of each tensor.
        """
        cut_by = (keys, nbytes, cap)
        if cut_by != self._cut_by:
            self._buckets = cut(range(len(keys)), keys.__getitem__, nbytes.__getitem__, cap)
            self._cut_by = cut_by
        return self._buckets


def overlap(
    items: Iterable[T],
    start: Callable[[T], W],
    finish: Callable[[T, W], None],
    limit: int = 2,
    cost: Callable[[T], int] = lambda item: 1,
) -> None:
    """Starts and finishes items in order, several at a time: one is packed while another communicates.

    The costs of the items under way sum to at most `limit`, since each item holds memory; one above `limit` runs alone.
    """
    started: deque[tuple[T, W]] = deque()
    under_way = 0
    for item in items:
        while started and under_way + cost(item) > limit:
            under_way -= cost(started[0][0])
            finish(*started.popleft())
        started.append((item, start(item)))
        under_way += cost(item)
    while started:
        finish(*started.popleft())


def presence(present: Sequence[bool], like: torch.Tensor, group: Communicator) -> torch.Tensor:
    """Flags `[len(present)]` of a bucket: 1 where this rank has a gradient, else 0.

    The flags are sent at the end of the bucket, and are summed.

    A parameter may have a gradient on some ranks only (an expert that got no tokens): a missing gradient counts as
    zero. A gradient that no rank has must stay None, as in one process, because weight decay and momentum change a
    parameter whose gradient is zero.
    """
    flags = like.new_ones(len(present)) if all(present) else like.new_tensor([float(flag) for flag in present])
    return spmd.trust(flags, group, P)


def is_anywhere(count: torch.Tensor) -> bool:
    """Returns whether any rank has a gradient that this rank lacks; waits for the device. False in a check."""
    return active() is None and not isinstance(count, FakeTensor) and bool(count > 0)

"""For handlers: a computation on this rank's shard that is not the same computation on the whole tensor.

Such as the maximum of a shard, its mean, or a running sum within it. The checker is told what the results are together;
without a check nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..comm import Communicator
from ..spmd import SpmdType, local_map
from ..spmd.watching import active

__all__ = ["on_own_shard"]


def on_own_shard(function: Callable[..., Any], types: Mapping[Communicator, SpmdType]) -> Callable[..., Any]:
    """`function`, whose results have these types: V, P, or S(dim)."""
    if not types or active() is None:
        return function
    return local_map(function, out_types=types)

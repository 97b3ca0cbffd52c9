"""Permutes of a custom function: those of its backward send gradients back to where the values came from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from ....spmd.errors import SpmdTypeError

__all__ = ["check_ways_back"]

Sent = Sequence[tuple[str, frozenset[tuple[Any, Any]]]]  # axis and pairs of ranks of each permute


def check_ways_back(name: str, where: str, forward: Sent, backward: Sent) -> None:
    """Checks that the permutes in the backward of the function `name`, called at `where`, reverse those of its forward.

    Raises:
        SpmdTypeError: one sends gradients another way.
    """
    back = Counter((axis, frozenset((dst, src) for src, dst in pairs)) for axis, pairs in forward)
    if not backward or not back or Counter(backward) == back:
        return
    axis, pairs = next(iter((Counter(backward) - back) or Counter(backward)))
    source, target = min(pairs)
    raise SpmdTypeError(
        f"{name}.backward, of the call at {where}",
        f"its permute over {axis} sends gradients from rank {source} to rank {target}, and forward sent no "
        f"values from rank {target} to rank {source}: gradients go back to where the values came from",
        repairs=[f"[(dst, src) for src, dst in pairs] of forward's pairs in {name}.backward"],
        rule="ways_back",
    )

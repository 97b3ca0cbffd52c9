"""Operators over windows on shards: bring each rank its window of every sharded dim, compute there, drop nothing.

A rank without outputs computes one of zeros and drops it, so that weights get gradients (of 0) on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ... import comm
from ...comm.context import AxisLike
from ..exchange import exchange
from ..intervals import Bounds
from ..windows import IndexMap, Range, plan_windows

__all__ = ["LocalWindow", "ShardedDim", "as_tuple", "bring_windows", "owned_outputs", "sharded_result", "sizes_of"]


class ShardedDim(NamedTuple):
    """A dim of a tensor that is sharded over an axis.

    Attributes:
        dim: not negative.
        bounds: of all shards, `(0, .., n)`.
    """

    dim: int
    bounds: Bounds
    axis: AxisLike


class LocalWindow(NamedTuple):
    """This rank's part of a sharded dim.

    Attributes:
        inputs: the virtual inputs that it has now.
        outputs: those that it computes.
        out_bounds: of all ranks.
    """

    inputs: Range
    outputs: Range
    out_bounds: Bounds


def bring_windows(
    x: torch.Tensor,
    sharded: Sequence[ShardedDim],
    maps: Mapping[int, IndexMap],
    fill: float | int | bool = 0,
) -> tuple[torch.Tensor, dict[int, LocalWindow]]:
    """The windows that this rank needs, one sharded dim after the other, and what they are, by dim.

    Args:
        maps: by dim; those of dims that are not sharded are left out.
    """
    windows: dict[int, LocalWindow] = {}
    for dim, bounds, axis in sharded:
        if dim not in maps:
            continue
        plan = plan_windows(maps[dim], bounds)
        rank = int(comm.communicator(axis).rank)
        x = exchange(x, plan.plan, axis, dim, fill)
        windows[dim] = LocalWindow(plan.windows[rank], plan.outputs(rank), plan.out_bounds)
    return x, windows


def owned_outputs(
    op: Callable[[torch.Tensor], Any], x: torch.Tensor, windows: Mapping[int, LocalWindow], extents: Mapping[int, int]
) -> Any:
    """`op(x)`, or the empty part of it, where this rank has no inputs of a dim: it needs none for its outputs.

    Args:
        extents: by dim, how many inputs `op` needs for one output.
    """
    empty = [dim for dim, window in windows.items() if window.inputs[0] == window.inputs[1]]
    for dim in empty:
        shape = list(x.shape)
        shape[dim] = extents[dim]
        x = torch.cat([x, x.new_zeros(shape)], dim)
    result = op(x)
    for dim in empty:
        result = (
            tuple(part.narrow(dim, 0, 0) for part in result) if isinstance(result, tuple) else result.narrow(dim, 0, 0)
        )
    return result


def sharded_result(sharded: Sequence[ShardedDim], windows: Mapping[int, LocalWindow]) -> tuple[ShardedDim, ...]:
    """The shards of the result."""
    return tuple(
        each._replace(bounds=windows[each.dim].out_bounds) if each.dim in windows else each for each in sharded
    )


def sizes_of(x: torch.Tensor, sharded: Sequence[ShardedDim]) -> list[int]:
    """The global shape of a shard."""
    shape = list(x.shape)
    for dim, bounds, _ in sharded:
        shape[dim] = bounds[-1]
    return shape


def as_tuple(value: int | Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """An option with an entry for each spatial dim.

    Raises:
        ValueError: it has another number of entries.
    """
    if isinstance(value, int):
        return (value,) * count
    values = tuple(value)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ValueError(f"{what} has {len(values)} entries, for {count} spatial dims: {values}")
    return values

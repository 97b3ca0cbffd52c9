"""Operators over windows on shards: each rank receives its window of every sharded dim, and computes its outputs.

A rank without outputs computes one of zeros and drops it, so that weights get gradients (of 0) on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ... import comm
from ...comm.context import AxisLike
from ...comm.rank_selection import in_one_program
from ..moves.exchange import exchange, start, take
from ..moves.intervals import Bounds
from .chains import plan_chain
from .index_maps import IndexMap, Range, Sliding, plan_edges, plan_windows

__all__ = [
    "LocalWindow",
    "ShardedDim",
    "Windows",
    "as_tuple",
    "bring_windows",
    "chained",
    "nonempty",
    "over_halo",
    "owned_outputs",
    "set_interior_threshold",
    "sharded_result",
    "sizes_of",
]


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


class Windows(NamedTuple):
    """A function over windows of the spatial dims.

    Attributes:
        maps: of every spatial dim, by dim.
        op: computes the windows: each sharded dim, without its padding, has the inputs of whole windows alone.
        fill: what stands outside of the inputs of a sharded dim.
    """

    maps: dict[int, Sliding]
    op: Callable[[torch.Tensor], Any]
    fill: float = 0.0


def bring_windows(
    x: torch.Tensor,
    sharded: Sequence[ShardedDim],
    maps: Mapping[int, IndexMap],
    fill: float | int | bool = 0,
) -> tuple[torch.Tensor, dict[int, LocalWindow]]:
    """Exchanges this rank's windows, one sharded dim after the other; returns them and their positions by dim.

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


_threshold: int | None = 1 << 20


def set_interior_threshold(elements: int | None) -> int | None:
    """Sets the number of elements from which a shard's interior is convolved while its halo travels; None: never.

    Below that, three small convolutions take longer than one. Returns the threshold that was set before.
    """
    global _threshold
    previous, _threshold = _threshold, elements
    return previous


def over_halo(
    op: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    sharded: ShardedDim,
    windows: Sliding,
    extents: Mapping[int, int],
    mixed: Collection[int] = (),
) -> tuple[torch.Tensor, LocalWindow]:
    """Computes `op` of this rank's window of one dim, a large interior first: `[.., in, ..] -> [.., out, ..]`.

    Args:
        op: gives an output for each whole window of `windows` along the dim.
        extents, mixed: as `owned_outputs` takes them.
    """
    dim, bounds, axis = sharded
    rank = int(comm.communicator(axis).rank)
    plan = plan_windows(windows, bounds)
    window = LocalWindow(plan.windows[rank], plan.outputs(rank), plan.out_bounds)
    largest = max(b - a for a, b in pairwise(bounds)) * math.prod(x.shape[:dim] + x.shape[dim + 1 :])
    if plan.plan.is_local or _threshold is None or largest < _threshold or in_one_program(x):  # all ranks decide alike
        x = exchange(x, plan.plan, axis, dim)
        return owned_outputs(op, x, extents, mixed), window
    edges = plan_edges(windows, bounds)
    (begin, end), (low, high), left = window.outputs, edges.inner[rank], edges.left[rank]
    started = start(x, edges.plan, axis, dim)
    parts = []
    if low < high:
        first, last = windows.window(low, high)
        parts.append(owned_outputs(op, x.narrow(dim, first - bounds[rank], last - first), extents, mixed))
    sides = exchange(x, edges.plan, axis, dim, started=started)
    if begin < low or high == end:  # the exchange is in the graph of every rank, though nothing may come of it
        parts.insert(0, owned_outputs(op, sides.narrow(dim, 0, left), extents, mixed))
    if high < end:
        parts.append(owned_outputs(op, sides.narrow(dim, left, sides.shape[dim] - left), extents, mixed))
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0], window


def chained(
    ops: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    x: torch.Tensor,
    sharded: ShardedDim,
    maps: Sequence[Sliding],
    fills: Sequence[float],
    mixed: Collection[int] = (1,),
) -> tuple[torch.Tensor, ShardedDim]:
    """Computes consecutive windows of one dim after one exchange; outputs near a bound on both of its ranks.

    Args:
        ops: each gives an output for each whole window of its map along the dim.
        fills: what is outside of the inputs of each.
        mixed: as `owned_outputs` takes it: channels, of convolutions.
    """
    dim, bounds, axis = sharded
    chain = plan_chain(tuple(maps), bounds)
    rank = int(comm.communicator(axis).rank)
    x = exchange(x, chain.exchange, axis, dim, fills[0])
    for i, (op, windows, fill) in enumerate(zip(ops, maps, fills, strict=True)):
        if i:
            x = take(x, chain.local[i - 1][rank], dim, fill)
        x = owned_outputs(op, x, {dim: windows.extent}, mixed)
    return x, sharded._replace(bounds=chain.out_bounds)


def owned_outputs(
    op: Callable[[torch.Tensor], Any],
    x: torch.Tensor,
    extents: Mapping[int, int],
    mixed: Collection[int] = (),
) -> Any:
    """Returns `op(x)`, empty where this rank has nothing along a dim; torch refuses most empty tensors.

    Args:
        extents: by dim, how many inputs `op` needs for one output; of other dims one.
        mixed: dims whose outputs are made of all inputs.
    """
    empty = [dim for dim in range(x.dim()) if x.shape[dim] == 0 and dim not in mixed]
    for dim in empty:
        x = nonempty(x, dim, extents.get(dim, 1))
    result = op(x)
    for dim in empty:
        result = (
            tuple(part.narrow(dim, 0, 0) for part in result) if isinstance(result, tuple) else result.narrow(dim, 0, 0)
        )
    return result


def nonempty(x: torch.Tensor, dim: int, length: int = 1) -> torch.Tensor:
    """Returns `x`, or zeros of `length` along a dim that is empty, in the graph of `x`."""
    if x.shape[dim]:
        return x
    return torch.cat([x, x.new_zeros([*x.shape[:dim], length, *x.shape[dim + 1 :]])], dim)


def sharded_result(sharded: Sequence[ShardedDim], windows: Mapping[int, LocalWindow]) -> tuple[ShardedDim, ...]:
    """Returns the shards of the result."""
    return tuple(
        shard._replace(bounds=windows[shard.dim].out_bounds) if shard.dim in windows else shard for shard in sharded
    )


def sizes_of(x: torch.Tensor, sharded: Sequence[ShardedDim]) -> list[int]:
    """Returns the global shape of the tensor of a shard."""
    shape = list(x.shape)
    for dim, bounds, _ in sharded:
        shape[dim] = bounds[-1]
    return shape


def as_tuple(value: int | Sequence[int], count: int, what: str) -> tuple[int, ...]:
    """Returns an option with an entry for each spatial dim.

    Raises:
        ValueError: it has another number of entries.
    """
    if isinstance(value, int):
        return (value,) * count
    values = tuple(value)
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise ValueError(f"{what} has {len(values)} entries for {count} spatial dims: {values}")
    return values

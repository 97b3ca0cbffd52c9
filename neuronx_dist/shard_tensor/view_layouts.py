"""Layouts in which a view that splits or merges dims takes place on every rank alone.

A view cuts the dims of a tensor into groups: the dims of a group before and after hold the same elements. A shard stays
if its dim is the first of its group (apart from ones) and the bounds of the shards are bounds of the new first dim. Any
other shard moves, by one exchange: within its dim to such bounds; else to the dim of which most ranks get a position,
of equal ones the first of its group; and where other mesh dims shard all of these, to one of them, which several mesh
dims shard then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import NamedTuple

import torch

from .merged_mesh import can_be_merged
from .placements import Placement, Replicate, Shard
from .spec import ShardTensorSpec, chunk_sizes, joined_sizes, make_spec

__all__ = ["layouts_of_view"]


class _First(NamedTuple):
    """The first dim of a group, and that of the result.

    `inner`, `outer`: elements behind them in their groups: a position of the one is `inner` elements, of the other
    `outer`.
    """

    dim: int
    target: int
    inner: int
    outer: int

    @property
    def block(self) -> int:
        """Positions of `dim` between two bounds of both dims."""
        return self.outer // gcd(self.inner, self.outer)


def layouts_of_view(spec: ShardTensorSpec, shape: torch.Size) -> tuple[ShardTensorSpec, ShardTensorSpec]:
    """Returns the layout of a tensor of `spec` in which it is viewed as `shape` locally, and the layout of the view."""
    source = _without_shards_of_one(spec)
    firsts = _firsts(source.shape, shape)
    placements, sizes = list(source.placements), list(source.sizes)
    without: list[int] = []  # mesh dims for which no dim is left
    for m, dim in source.sharded:
        first, along = firsts.get(dim), source.sizes[m] or ()
        if first is None or any(size * first.inner % first.outer for size in along):
            free = [
                firsts[d] for d in firsts if d == dim or d not in [p.dim for p in placements if isinstance(p, Shard)]
            ]
            placements[m], sizes[m] = _moved(source.shape, dim, free, len(along), _group_of(dim, source.shape, shape))
            without += [] if free else [m]
    if without and can_be_merged(spec.mesh):
        _join(source, placements, sizes, without, firsts, shape)
    source = make_spec(spec.mesh, placements, spec.shape, sizes)
    for m, dim in source.sharded:
        first = firsts[dim]
        placements[m] = Shard(first.target)
        sizes[m] = tuple(size * first.inner // first.outer for size in source.sizes[m] or ())
    return source, make_spec(spec.mesh, placements, shape, sizes)


def _moved(
    shape: Sequence[int], dim: int, free: Sequence[_First], count: int, group: Sequence[int]
) -> tuple[Placement, tuple[int, ...] | None]:
    """Returns the placement, and the sizes, of a shard of `dim` over `count` ranks that a view would cut.

    `free`: dims that can be sharded, and that no other mesh dim shards; `group`: dims that are merged with `dim`.
    """

    def cost(first: _First) -> tuple[bool, int, bool]:
        return first.dim != dim, -min(shape[first.dim] // first.block, count), first.dim not in group

    if not free:
        return Replicate(), None
    best = min(free, key=cost)
    blocks = shape[best.dim] // best.block
    return Shard(best.dim), tuple(size * best.block for size in chunk_sizes(blocks, count))


def _join(
    source: ShardTensorSpec,
    placements: list[Placement],
    sizes: list[tuple[int, ...] | None],
    joining: Sequence[int],
    firsts: dict[int, _First],
    shape: Sequence[int],
) -> None:
    """Lets mesh dims for which no dim is left shard one that another mesh dim shards, of their group if possible."""
    sharded = {p.dim: m for m, p in enumerate(placements) if isinstance(p, Shard) and p.dim in firsts}
    if not sharded:
        return
    group = _group_of(source.placements[joining[0]].dim, source.shape, shape)  # type: ignore[attr-defined]
    dim = max(sharded, key=lambda d: (d in group, source.shape[d]))
    along = joined_sizes(source.mesh, sharded[dim], sizes[sharded[dim]] or (), joining, firsts[dim].block)
    for m in (sharded[dim], *joining):
        placements[m], sizes[m] = Shard(dim), along


def _firsts(before: Sequence[int], after: Sequence[int]) -> dict[int, _First]:
    """Returns the first dim of each group, by itself; none of a group of one element."""
    firsts: dict[int, _First] = {}
    for ins, outs in _groups(before, after):
        dim = next((d for d in ins if before[d] != 1), None)
        target = next((d for d in outs if after[d] != 1), None)
        if dim is not None and target is not None:
            inner, outer = prod(before[d] for d in ins if d > dim), prod(after[d] for d in outs if d > target)
            if outer and before[dim] * inner == after[target] * outer:  # not so in some groups of no element
                firsts[dim] = _First(dim, target, inner, outer)
    return firsts


def _group_of(dim: int, before: Sequence[int], after: Sequence[int]) -> Sequence[int]:
    return next(ins for ins, _ in _groups(before, after) if dim in ins)


def _without_shards_of_one(spec: ShardTensorSpec) -> ShardTensorSpec:
    """Returns the layout without shards of dims of one element, which a view may drop."""
    placements = [Replicate() if isinstance(p, Shard) and spec.shape[p.dim] == 1 else p for p in spec.placements]
    return make_spec(spec.mesh, placements, spec.shape, spec.sizes)


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Returns groups of dims of two shapes that hold the same elements, from the left."""
    if 0 in before:  # products are all 0: dims that are equal from the left belong together
        same = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
        return [([i], [i]) for i in range(same)] + [([*range(same, len(before))], [*range(same, len(after))])]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        ins: list[int] = []
        outs: list[int] = []
        a = b = 1
        if i < len(before):
            a *= before[i]
            ins.append(i)
            i += 1
        if j < len(after):
            b *= after[j]
            outs.append(j)
            j += 1
        while a != b:
            if a < b:
                a *= before[i]
                ins.append(i)
                i += 1
            else:
                b *= after[j]
                outs.append(j)
                j += 1
        if ins and not outs and groups:  # ones at the end
            groups[-1][0].extend(ins)
        elif outs and not ins and groups:
            groups[-1][1].extend(outs)
        else:
            groups.append((ins, outs))
    return groups

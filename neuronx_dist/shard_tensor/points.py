"""Nearest neighbours of points, by rings: the points go around the ranks, and every rank has its queries.

No rank ever holds more than two shards of the points, and the distances of its queries to one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .labels import one_mesh, planned
from .merged import on_single_mesh_dims
from .moves.fetch import has_values
from .moves.redistribute import redistributed
from .placements import Placement, Replicate, Shard
from .ring import RingPassingConfig, perform_ring_iteration_async
from .spec import ShardTensorSpec, make_spec
from .tensor import ShardTensor, local_of, wrap

__all__ = ["Neighbours", "knn", "radius_search"]


class Neighbours(NamedTuple):
    """The neighbours of m queries, in the layout of the queries.

    Attributes:
        indices: [m, k], of points; -1 where `radius_search` finds fewer.
        distances: [m, k], ascending, differentiable; infinite where there is none.
        points: [m, k, d], differentiable; 0 where there is none.
    """

    indices: torch.Tensor
    distances: torch.Tensor
    points: torch.Tensor


@on_single_mesh_dims
def knn(x: Any, y: Any, k: int) -> Neighbours:
    """Returns the `k` points of `x` nearest to each point of `y`; of equal distances, the smaller index.

    Args:
        x: points, [n, d]; plain, or sharded in shards of any sizes.
        y: queries, [m, d]; the same. Those that every rank has are split among the ranks of sharded points.

    Raises:
        ValueError: shapes that do not fit, or fewer than `k` points; on all ranks.
    """
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"knn: points {tuple(x.shape)} and queries {tuple(y.shape)} must be [n, d] and [m, d]")
    if not 0 < k <= x.shape[0]:
        raise ValueError(f"knn: k={k} of {x.shape[0]} points: k must be from 1 to that number")
    if isinstance(x, ShardTensor) or isinstance(y, ShardTensor):
        x, y = _in_rows(x, y)
    with torch.no_grad():
        indices = _ring(x.detach(), y.detach(), k)
    points = x[indices]
    return Neighbours(indices, torch.linalg.vector_norm(points - y.unsqueeze(1), dim=-1), points)


def radius_search(x: Any, y: Any, radius: float, max_points: int) -> Neighbours:
    """Returns the points of `x` within `radius` of each point of `y`; the nearest `max_points`, if there are more.

    Raises:
        ValueError: a negative radius or number of points, and those of `knn`.
    """
    if radius < 0 or max_points < 1:
        raise ValueError(f"radius_search: radius={radius} must be at least 0, and max_points={max_points} at least 1")
    indices, distances, points = knn(x, y, min(max_points, x.shape[0]))
    within = distances.detach() <= radius
    return Neighbours(
        torch.where(within, indices, -1),
        torch.where(within, distances, float("inf")),
        torch.where(within.unsqueeze(-1), points, 0.0),
    )


def _in_rows(x: Any, y: Any) -> tuple[ShardTensor, ShardTensor]:
    """Brings points and queries to shards of rows; unsharded queries are divided over the ranks of the points."""
    mesh = one_mesh((x, y), "knn")
    both = []
    for operand in (x, y):
        if not isinstance(operand, ShardTensor):
            operand = wrap(operand, make_spec(mesh, None, operand.shape))
        both.append(operand)
    x, y = both
    points, queries = _layouts(x._spec, y._spec)
    return tuple(
        wrap(redistributed(local_of(operand), operand._spec, spec), spec)
        for operand, spec in ((x, points), (y, queries))
    )  # type: ignore[return-value]


@planned
def _layouts(points: ShardTensorSpec, queries: ShardTensorSpec) -> tuple[ShardTensorSpec, ShardTensorSpec]:
    def by_rows(spec: ShardTensorSpec) -> list[Placement]:
        return [p if isinstance(p, Shard) and p.dim == 0 else Replicate() for p in spec.placements]

    x, y = by_rows(points), by_rows(queries)
    sizes = list(queries.sizes)
    m = points.mesh_dim_of.get(0)
    if m is not None and not any(isinstance(placement, Shard) for placement in y):
        y[m], sizes[m] = Shard(0), None
    return (
        make_spec(points.mesh, x, points.shape, points.sizes),
        make_spec(queries.mesh, y, queries.shape, sizes),
    )


def _nearest(distances: torch.Tensor, indices: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `k` smallest of candidates; those of equal distance are in the order of their indices."""
    distances, order = distances.sort(dim=1, stable=True)
    return distances[:, :k], indices.gather(1, order[:, :k])


def _ring(x: Any, y: Any, k: int) -> Any:
    """Returns the indices of the nearest points, [m, k]; other ranks' points arrive one shard after the other."""
    queries = y._local if isinstance(y, ShardTensor) else y
    block = x._local if isinstance(x, ShardTensor) else x
    m = x._spec.mesh_dim_of.get(0) if isinstance(x, ShardTensor) else None
    if m is None:
        _, indices = _block(queries, block, 0, k)
        return wrap(indices, _result(y._spec, k)) if isinstance(y, ShardTensor) else indices
    spec = x._spec
    sizes, group = spec.sizes[m] or (), spec.mesh.communicator(m)
    count, rank = group.size, int(group.rank)
    none = queries.new_empty((len(queries), 0))
    best = none, none.to(torch.int64)
    for iteration in range(count):
        source = (rank - iteration) % count
        passing = None
        if iteration < count - 1:
            shape = (sizes[(source - 1) % count], spec.shape[1])
            passing = perform_ring_iteration_async(block, spec.mesh, RingPassingConfig(m), recv_shape=shape)
        candidates = _block(queries, block, sum(sizes[:source]), k)
        best = _merged(best, candidates, k)
        if passing is not None:
            block = passing.wait()
    return wrap(best[1], _result(y._spec, k))


def _block(queries: torch.Tensor, points: torch.Tensor, offset: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the `k` nearest of some points, ascending; equal distances in the order of indices from `offset` on."""
    distances = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
    count = min(k, len(points))
    nearest, indices = distances.topk(min(k + 1, len(points)), 1, largest=False)
    if has_values(distances) and count < len(
        points
    ):  # topk takes any of equal ones: rows that end among them are sorted
        tied = (nearest[:, count - 1] == nearest[:, count]).nonzero()[:, 0]
        indices[tied] = distances[tied].sort(dim=1, stable=True)[1][:, : count + 1]
    indices = indices[:, :count].sort(1)[0]
    return _nearest(distances.gather(1, indices), indices + offset, count)


def _merged(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor], k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    distances, indices = (torch.cat(pair, 1) for pair in zip(one, other))
    indices, order = indices.sort(1)
    return _nearest(distances.gather(1, order), indices, k)


def _result(spec: ShardTensorSpec, k: int) -> ShardTensorSpec:
    return spec.with_shape(torch.Size((spec.shape[0], k)))

"""The spec of a tensor from one rank's part: inferred from all ranks' shapes, by chunks, or given by a dict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from .. import comm
from ..spmd import P
from .device_mesh import DeviceMesh
from .merged_mesh import groups_of, merged_mesh
from .moves.exchange import linked
from .placements import Partial, Placement, Shard, checked_placements
from .spec import ShardTensorSpec, make_spec, of_merged
from .typed import unseen

__all__ = ["check_plain", "local_spec", "weighed"]


def check_plain(x: torch.Tensor) -> None:
    """Raises a ValueError for a ShardTensor or DTensor, which has a layout already."""
    if hasattr(x, "placements"):
        raise ValueError(
            f"from_local: local_tensor is a {type(x).__name__}, {x.placements}, and must be a plain tensor: call "
            "redistribute() to change a layout, ShardTensor.from_dtensor(x) to convert a DTensor"
        )


def local_spec(
    local_shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    sharding_shapes: str | Mapping[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None = None,
) -> ShardTensorSpec:
    """Returns the spec of a tensor from the shape of this rank's part; see `ShardTensor.from_local`."""
    local = torch.Size(local_shape)
    checked = checked_placements(placements, mesh.ndim, len(local))
    if isinstance(sharding_shapes, str) and sharding_shapes not in ("infer", "chunk"):
        raise ValueError(f'from_local: sharding_shapes={sharding_shapes!r} is not "infer", "chunk" or a dict of shapes')
    if mesh.communicators is None and (global_shape is None or sharding_shapes == "infer"):
        raise ValueError(
            f"from_local: rank {mesh.get_rank()} is not in {mesh}, so it cannot infer the layout from its empty "
            'local tensor: pass global_shape, and sharding_shapes as "chunk" or a dict'
        )
    if sharding_shapes == "infer":
        groups = groups_of(checked)
        inferred = _inferred(local, merged_mesh(mesh, groups), [checked[group[0]] for group in groups])
        spec = of_merged(inferred, mesh, groups)
    elif isinstance(sharding_shapes, str):
        if global_shape is None:
            sizes = [mesh.shape[m] if isinstance(p, Shard) else 1 for m, p in enumerate(checked)]
            shape = list(local)
            for placement, count in zip(checked, sizes):
                if isinstance(placement, Shard):
                    shape[placement.dim] *= count
            global_shape = shape
        spec = make_spec(mesh, checked, global_shape)
    else:
        spec = _stated(local, mesh, checked, sharding_shapes, global_shape)
    if spec.local_shape != local:
        raise ValueError(
            f"from_local: the local tensor has shape {tuple(local)}, but its layout requires "
            f"{tuple(spec.local_shape)}: {spec}"
        )
    if global_shape is not None and spec.shape != torch.Size(global_shape):
        raise ValueError(
            f"from_local: the shards add up to shape {tuple(spec.shape)}, but global_shape is {tuple(global_shape)}"
        )
    return spec


def _inferred(local: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> ShardTensorSpec:
    shape = list(local)
    sizes: list[tuple[int, ...] | None] = []
    for m, placement in enumerate(placements):
        shapes = comm.gather_objects((tuple(local), tuple(sizes)), mesh.communicator(m))
        dim = placement.dim if isinstance(placement, Shard) else None
        others = {
            (len(local_shape), *(size for d, size in enumerate(local_shape) if d != dim)) for local_shape, _ in shapes
        }
        if len(others) > 1 or len({local_shape for _, local_shape in shapes}) > 1:
            found = [local_shape for local_shape, _ in shapes]
            raise ValueError(
                f"from_local: shapes along mesh dim {m} ({placement!r}) must be "
                f"equal{('' if dim is None else f' but for dim {dim}')}, but the ranks have {found}"
            )
        sizes.append(None if dim is None else tuple(local_shape[dim] for local_shape, _ in shapes))
        if dim is not None:
            shape[dim] = sum(sizes[-1] or ())
    return make_spec(mesh, placements, shape, sizes)


def _stated(
    local: torch.Size,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    sharding_shapes: Mapping[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> ShardTensorSpec:
    shape = list(local if global_shape is None else global_shape)
    sizes: list[tuple[int, ...] | None] = []
    for m, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            sizes.append(None)
            continue
        if m not in sharding_shapes:
            raise ValueError(f"from_local: sharding_shapes has no entry for mesh dim {m}, which is {placement!r}")
        along = tuple(int(shard_shape[placement.dim]) for shard_shape in sharding_shapes[m])
        sizes.append(along)
        shape[placement.dim] = sum(along)
    return make_spec(mesh, placements, shape, sizes)


def weighed(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    sharding_shapes: Mapping[int, Sequence[Sequence[int]]],
) -> tuple[torch.Tensor, Sequence[Placement] | None]:
    """Scales means of shards that differ in size to summands of the global mean, by counts of elements.

    Args:
        sharding_shapes: at a mesh dim that is `Partial("avg")`, the shapes of the shards whose means the ranks have.

    Raises:
        ValueError: not one shape for each rank.
    """
    result = list(placements or ())
    for m, placement in enumerate(result):
        if placement != Partial("avg") or m not in sharding_shapes or mesh.communicators is None:
            continue
        counts = [prod(shape) for shape in sharding_shapes[m]]
        if len(counts) != mesh.shape[m]:
            raise ValueError(
                f"from_local: sharding_shapes has {len(counts)} shapes for mesh dim {m}, which is {placement!r} "
                f"over {mesh.shape[m]} ranks: pass one for each rank, the shape of the shard whose mean it holds"
            )
        if len(set(counts)) == 1:
            continue
        group = mesh.communicator(m)
        local_count, result[m] = counts[int(group.rank)], Partial()
        share = local_count / sum(counts)

        def summand(x: torch.Tensor = local, share: float = share) -> torch.Tensor:
            return x * share if share else linked(torch.zeros_like(x), x)  # the mean of nothing is no number

        local = unseen(summand, local, group, P)
    return local, result

"""Placements in the form of XLA's compiler, a partition spec, and back.

GSPMD names, for every dim of a tensor, the mesh axis that shards it, or None. It cuts a dim into equal parts, so that
only even shards have one; a Partial has none.

    mark_sharding(x, xla_mesh, partition_spec(spec))        # torch_xla.distributed.spmd
"""

from __future__ import annotations

from collections.abc import Sequence

from .placements import Placement, Replicate, Shard, checked_placements
from .spec import ShardTensorSpec

__all__ = ["partition_spec", "placements_of"]


def partition_spec(spec: ShardTensorSpec) -> tuple[int | None, ...]:
    """Returns the mesh dim that shards each tensor dim, or None.

    Raises:
        ValueError: shards of different sizes, a dim that several mesh dims shard, or a Partial.
    """
    if spec.merged is not None:
        raise ValueError(
            f"partition_spec: {list(spec.placements)} shards one tensor dim on several mesh dims: redistribute() it to "
            "a mesh that merges them into one dim"
        )
    for m in spec.partial:
        raise ValueError(
            f"partition_spec: {spec.placements[m]!r} on mesh dim {m} has no partition spec: redistribute() it first"
        )
    for m, dim in spec.sharded:
        if len(set(spec.sizes[m] or ())) > 1:
            raise ValueError(
                f"partition_spec: dim {dim} has shards of sizes {list(spec.sizes[m] or ())}, but XLA needs equal "
                f"shards: pad the dim to a multiple of {spec.mesh.shape[m]}, or redistribute() it"
            )
    return tuple(spec.mesh_dim_of.get(dim) for dim in range(len(spec.shape)))


def placements_of(partition: Sequence[int | None], mesh_ndim: int) -> tuple[Placement, ...]:
    """Returns the placements of a partition spec, one for each mesh dim.

    Raises:
        ValueError: a mesh dim that there is not, or that shards two dims.
    """
    placements: list[Placement] = [Replicate()] * mesh_ndim
    for dim, mesh_dim in enumerate(partition):
        if mesh_dim is None:
            continue
        if not 0 <= mesh_dim < mesh_ndim or isinstance(placements[mesh_dim], Shard):
            raise ValueError(
                f"partition spec {tuple(partition)}: entry {mesh_dim} for dim {dim} must be one of {mesh_ndim} mesh "
                "dims, and shard no other dim"
            )
        placements[mesh_dim] = Shard(dim)
    return checked_placements(placements, mesh_ndim, len(partition))

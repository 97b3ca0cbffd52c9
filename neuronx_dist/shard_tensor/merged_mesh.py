"""Meshes of which several dims are merged into one, for a tensor dim that several mesh dims shard.

`[Shard(0), Shard(0)]` on a mesh of 2 x 3 is torch's order: mesh dim 0 splits the dim, mesh dim 1 each of its parts. So
it is `[Shard(0)]` on the mesh of 6 ranks in row-major order, and a layout with such a dim has that other layout as
`merged`. A function of such a tensor is computed on the merged mesh (`merged.py`), where each tensor dim has one mesh
dim, and no handler knows of it. `sizes` are those of all six shards, at both mesh dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from .. import comm
from ..spmd import no_typecheck
from ..torch_internals.fake_tensors import unset_fake_temporarily
from .device_mesh import DeviceMesh
from .placements import Placement, Shard

__all__ = ["Groups", "can_be_merged", "groups_of", "merged_mesh", "number_in"]

Groups = tuple[tuple[int, ...], ...]  # mesh dims by the dim of the merged mesh that they are


def groups_of(placements: Sequence[Placement]) -> Groups:
    """Returns the mesh dims that shard one tensor dim together, and every other mesh dim by itself."""
    groups: dict[tuple[str, int], list[int]] = {}
    for m, placement in enumerate(placements):
        key = ("dim", placement.dim) if isinstance(placement, Shard) else ("mesh dim", m)
        groups.setdefault(key, []).append(m)
    return tuple(map(tuple, groups.values()))


def can_be_merged(mesh: DeviceMesh) -> bool:
    """Returns whether all ranks of the job are in the mesh, or in the mesh that it is a part of."""
    while "part of" in mesh.tables:
        mesh, _ = mesh.tables["part of"]
    return mesh.size() == comm.current().mesh.world_size


def merged_mesh(mesh: DeviceMesh, groups: Groups) -> DeviceMesh:
    """Returns the mesh with a dim for each group of mesh dims, row-major; made once, by all ranks of the job.

    Of a part of a mesh, `mesh["cp", "tp"]`, it is the part of the mesh that is merged with its other dims as they are.

    Raises:
        ValueError: some ranks of the job are not in the mesh, so that they would not take part.
    """
    if len(groups) == mesh.ndim:
        return mesh
    table = mesh.tables.setdefault("merged meshes", {})
    if groups not in table:
        if not can_be_merged(mesh):
            raise ValueError(
                f"one tensor dim on several dims of {mesh}: the mesh has {mesh.size()} of the job's "
                f"{comm.current().mesh.world_size} ranks, and a group over several of its dims needs all of these; "
                "shard the dim on one mesh dim, or on a part of a mesh that has all of them, by its names of dims"
            )
        if "part of" in mesh.tables:
            whole, names = mesh.tables["part of"]
            part = table[groups] = _part_of_merged(whole, names, groups)
            return part
        names = mesh.mesh_dim_names and tuple("_".join(mesh.mesh_dim_names[m] for m in group) for group in groups)
        shape = [prod(mesh.shape[m] for m in group) for group in groups]
        with no_typecheck(), unset_fake_temporarily():
            ranks = mesh.mesh.permute([m for group in groups for m in group]).reshape(shape)
        table[groups] = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)
    result: DeviceMesh = table[groups]
    return result


def _part_of_merged(whole: DeviceMesh, names: Sequence[str], groups: Groups) -> DeviceMesh:
    """Returns this rank's part of a mesh along some of its dims, which `groups` merge."""
    all_names = whole.mesh_dim_names or ()
    dims = [all_names.index(name) for name in names]
    others = tuple((dim,) for dim in range(whole.ndim) if dim not in dims)
    merged = merged_mesh(whole, (*others, *(tuple(dims[m] for m in group) for group in groups)))
    return merged[(merged.mesh_dim_names or ())[len(others) :]]


def number_in(mesh: DeviceMesh, groups: Groups, number: int) -> int:
    """Returns the number in the merged mesh of the rank `mesh.mesh.flatten()[number]`."""
    coordinate, result = mesh.coordinate_of(number), 0
    for m in (m for group in groups for m in group):
        result = result * mesh.shape[m] + coordinate[m]
    return result

"""`ShardTensorSpec`: the layout of a tensor on a device mesh, with the size of every shard. Never communicates.

Specs are interned on their mesh, as long as somebody holds them: equal ones are the same object, so that a plan for an
operation is looked up by identity. (`Layout` is another thing in this package: the degrees of a job.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import torch

from .bounded import Bounded
from .device_mesh import DeviceMesh, as_mesh
from .merged_mesh import Groups, groups_of, merged_mesh
from .placements import Partial, Placement, Replicate, Shard, checked_placements

__all__ = [
    "Offsets",
    "ShardTensorSpec",
    "Sizes",
    "chunk_sizes",
    "compute_local_shape_and_global_offset",
    "gradient_spec",
    "joined_sizes",
    "make_spec",
    "of_merged",
    "on_merged",
]

Sizes = tuple["tuple[int, ...] | None", ...]  # for each mesh dim: of its shards, None where it shards nothing


class TensorMeta(NamedTuple):
    """The shape and the strides of a whole tensor; torch's class of this name has the dtype too."""

    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def dtype(self) -> NoReturn:
        raise AttributeError("tensors of several dtypes share a layout, which has no dtype: read x.dtype of the tensor")


class ShardTensorSpec:
    """The layout of a tensor; frozen.

    Attributes:
        mesh: the device mesh.
        placements: one for each mesh dim; dims are counted from the front.
        shape: of the whole tensor.
        sizes: for each mesh dim the sizes of all shards of its tensor dim; None where it shards nothing. Where several
            mesh dims shard that dim, all have the same sizes, row-major over these mesh dims.
        local_shape: of this rank's shard; of a rank that is no part of the mesh, empty.
        offsets: where this rank's shard begins, for each tensor dim.
        sharded: `(mesh dim, tensor dim)` of every shard.
        partial: the mesh dims along which the tensor is a sum (maximum) over the ranks.
        mesh_dim_of: tensor dim -> mesh dim, of the sharded ones.
        groups: mesh dims that shard one tensor dim together; each other mesh dim by itself.
        merged: the same layout on the mesh that merges each group (`merged_mesh.py`); None where each is one mesh dim.
        is_ordinary: this rank is in the mesh, and nothing is merged.
    """

    __slots__ = (
        "__weakref__",
        "groups",
        "is_ordinary",
        "local_shape",
        "merged",
        "mesh",
        "mesh_dim_of",
        "offsets",
        "partial",
        "placements",
        "shape",
        "sharded",
        "sizes",
    )

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    sizes: Sizes
    local_shape: torch.Size
    offsets: tuple[int, ...]
    sharded: tuple[tuple[int, int], ...]
    partial: tuple[int, ...]
    mesh_dim_of: Mapping[int, int]
    groups: Groups
    merged: ShardTensorSpec | None
    is_ordinary: bool

    def __init__(self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, sizes: Sizes) -> None:
        sharded = tuple((m, p.dim) for m, p in enumerate(placements) if isinstance(p, Shard))
        local, offsets = list(shape), [0] * len(shape)
        coordinate = mesh.get_coordinate()
        groups = groups_of(placements)
        for group in groups:
            placement, along = placements[group[0]], sizes[group[0]]
            if coordinate is not None and isinstance(placement, Shard):
                assert along is not None
                index = coordinate[group[0]]
                for m in group[1:]:
                    index = index * mesh.shape[m] + coordinate[m]
                # Of uneven shards the shapes are those of this rank alone: a check has to know that it was asked.
                index = index if len(set(along)) == 1 else int(index)
                local[placement.dim], offsets[placement.dim] = along[index], sum(along[:index])
        if coordinate is None:  # no part of the mesh: it holds nothing
            local[:1] = [0]
        for name, value in {
            "mesh": mesh,
            "placements": placements,
            "shape": shape,
            "sizes": sizes,
            "sharded": sharded,
            "partial": tuple(m for m, p in enumerate(placements) if isinstance(p, Partial)),
            "mesh_dim_of": MappingProxyType({dim: m for m, dim in sharded}),
            "local_shape": torch.Size(local),
            "offsets": tuple(offsets),
            "groups": groups,
            "is_ordinary": coordinate is not None and len(groups) == mesh.ndim,
        }.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "merged", None if len(groups) == mesh.ndim else on_merged(self, groups))

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"{name} of a layout cannot be set, because tensors share the layout; use redistribute(mesh, "
            "placements, sizes=)"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{name} of a layout cannot be deleted, because tensors share the layout")

    def sharding_shapes(self, mesh_dim: int | None = None) -> Any:
        """Returns the shapes of all shards along a mesh dim; without one, a dict with every sharded mesh dim.

        Where several mesh dims shard one tensor dim, these are the shapes of all its shards, for each of them.
        """
        if mesh_dim is None:
            return {m: self.sharding_shapes(m) for m, _ in self.sharded}
        placement = self.placements[mesh_dim]
        count = self.mesh.shape[mesh_dim]
        if not isinstance(placement, Shard):
            return (self.local_shape,) * count
        before, behind = self.local_shape[: placement.dim], self.local_shape[placement.dim + 1 :]
        return tuple(torch.Size((*before, size, *behind)) for size in self.sizes[mesh_dim] or ())

    # names of torch's DTensorSpec

    @property
    def device_mesh(self) -> DeviceMesh:
        return self.mesh

    @property
    def tensor_meta(self) -> TensorMeta:
        """Returns the shape and the strides of the whole tensor, by torch's names."""
        return TensorMeta(self.shape, torch.empty(self.shape, device="meta").stride())

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_shards(self) -> int:
        """Returns the number of different parts of the tensor."""
        return prod(self.mesh.shape[m] for m, _ in self.sharded)

    @property
    def dim_map(self) -> list[int]:
        """Returns for each tensor dim the mesh dim that it is sharded over (of several the last), -1 for none."""
        return [self.mesh_dim_of.get(dim, -1) for dim in range(self.ndim)]

    @property
    def num_shards_map(self) -> list[int]:
        """Returns for each tensor dim the number of its shards."""
        return [prod(self.mesh.shape[m] for m, d in self.sharded if d == dim) for dim in range(self.ndim)]

    @property
    def sums(self) -> list[int]:
        """Returns the mesh dims that are Partial."""
        return list(self.partial)

    def is_replicated(self) -> bool:
        return all(isinstance(placement, Replicate) for placement in self.placements)

    def is_sharded(self) -> bool:
        return bool(self.sharded)

    def with_shape(self, shape: torch.Size) -> ShardTensorSpec:
        """Returns this layout for another shape whose sharded dims have the same sizes."""
        return make_spec(self.mesh, self.placements, shape, self.sizes)

    def replicated(self) -> ShardTensorSpec:
        """Returns the layout with the complete tensor on every rank."""
        return make_spec(self.mesh, (Replicate(),) * self.mesh.ndim, self.shape)

    def __repr__(self) -> str:
        sizes = {m: self.sizes[m] for m, _ in self.sharded}
        return f"ShardTensorSpec({self.mesh}, {self.placements}, shape={tuple(self.shape)}, sizes={sizes})"

    def __deepcopy__(self, memo: Any) -> ShardTensorSpec:
        return self

    def __reduce__(self) -> Any:
        return make_spec, (self.mesh, self.placements, self.shape, self.sizes)


class Offsets(tuple[int, ...]):
    """First positions of a shard, for each tensor dim; called, along each mesh dim: PhysicsNeMo's `offsets(mesh_dim)`.

    Along a mesh dim that shards nothing the position is 0; along several that shard one dim, where the part of the
    mesh dims up to this one begins.
    """

    _spec: ShardTensorSpec

    def __new__(cls, spec: ShardTensorSpec) -> Offsets:
        result = super().__new__(cls, spec.offsets)
        result._spec = spec
        return result

    def __call__(self, mesh_dim: int | None = None) -> Any:
        """Returns the position along a mesh dim; without one, those of all mesh dims."""
        mesh = self._spec.mesh
        coordinate, along = mesh.get_coordinate() or [0] * mesh.ndim, [0] * mesh.ndim
        for group in self._spec.groups:
            shards = prod(mesh.shape[m] for m in group)
            index = 0
            for m in group:
                shards //= mesh.shape[m]
                index += coordinate[m] * shards
                along[m] = sum((self._spec.sizes[m] or ())[:index])
        return tuple(along) if mesh_dim is None else along[mesh_dim]

    def __reduce__(self) -> Any:
        return tuple, (tuple(self),)


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    shape: Sequence[int],
    sizes: Sequence[Sequence[int] | None] | None = None,
) -> ShardTensorSpec:
    """Returns the spec of a tensor of the global `shape`.

    Args:
        sizes: for each mesh dim the sizes of its shards, or None for chunks, as `torch.chunk` cuts them. Where several
            mesh dims shard one tensor dim, those of all its shards, row-major, at one or all of these mesh dims.

    Raises:
        ValueError: placements that do not fit (`checked_placements`); sizes that are not one for each rank of the mesh
            dim, are negative, or do not add up to the tensor's dim.
    """
    shape = shape if isinstance(shape, torch.Size) else torch.Size(shape)
    specs = mesh.tables.get("specs")
    if specs is None:
        specs = mesh.tables["specs"] = Bounded()
        mesh.tables["living specs"] = WeakValueDictionary()
    key = (tuple(placements) if placements is not None else None, shape, None if sizes is None else tuple(sizes))
    try:
        spec: ShardTensorSpec | None = specs.get(key)
    except TypeError:  # sizes as lists
        key = (
            key[0],
            shape,
            tuple(None if along is None else tuple(along) for along in sizes or ()),
        )
        spec = specs.get(key)
    if spec is not None:
        return spec
    # A whole size that was computed of a local one is no local size: under a check, a mean would divide by too little.
    shape = torch.Size(map(int, shape))
    checked = checked_placements(placements, mesh.ndim, len(shape))
    if sizes is not None and len(sizes) != mesh.ndim:
        raise ValueError(
            f"sizes {list(sizes)} has {len(sizes)} entries for a mesh of {mesh.ndim} dims; pass one for each mesh dim"
        )
    complete: list[tuple[int, ...] | None] = [None] * mesh.ndim
    for group in groups_of(checked):
        placement = checked[group[0]]
        if not isinstance(placement, Shard):
            continue
        requested = [tuple(map(int, along)) for m in group if sizes is not None and (along := sizes[m]) is not None]
        counts = [mesh.shape[m] for m in group]
        along = requested[0] if requested else chunk_sizes(shape[placement.dim], *counts)
        if len(set(requested)) > 1:
            raise ValueError(
                f"sizes {requested} on mesh dims {group} must be equal: all of them shard dim {placement.dim}"
            )
        if len(along) != prod(counts) or sum(along) != shape[placement.dim] or min(along) < 0:
            where = f"mesh dim {group[0]}" if len(group) == 1 else f"mesh dims {group}"
            raise ValueError(
                f"sizes {list(along)} on {where} must be {prod(counts)} numbers of at least 0 with sum "
                f"{shape[placement.dim]}, the size of dim {placement.dim} of shape {tuple(shape)}"
            )
        for m in group:
            complete[m] = along
    full_key = (checked, shape, tuple(complete))
    living = mesh.tables["living specs"]
    spec = living.get(full_key)
    if spec is None:
        spec = living[full_key] = ShardTensorSpec(mesh, checked, shape, tuple(complete))
    specs[key] = spec
    return spec


def gradient_spec(spec: ShardTensorSpec) -> ShardTensorSpec:
    """Returns the layout of a tensor's gradient: Replicate where the tensor is Partial."""
    if not spec.partial:
        return spec
    placements = tuple(Replicate() if isinstance(placement, Partial) else placement for placement in spec.placements)
    return make_spec(spec.mesh, placements, spec.shape, spec.sizes)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of this rank's chunk of a tensor, and where it begins along each dim."""
    spec = make_spec(as_mesh(mesh), placements, global_shape)
    return tuple(spec.local_shape), spec.offsets


def on_merged(spec: ShardTensorSpec, groups: Groups) -> ShardTensorSpec | None:
    """Returns a layout on the mesh that merges each group of mesh dims; None if it has none there."""
    firsts = [group[0] for group in groups]
    placements = [spec.placements[m] for m in firsts]
    dims = [placement.dim for placement in placements if isinstance(placement, Shard)]
    if len({*dims}) < len(dims) or any(
        spec.placements[m] != spec.placements[group[0]] for group in groups for m in group
    ):
        return None
    if len(groups) == spec.mesh.ndim:
        return spec
    return make_spec(merged_mesh(spec.mesh, groups), placements, spec.shape, [spec.sizes[m] for m in firsts])


def of_merged(spec: ShardTensorSpec, mesh: DeviceMesh, groups: Groups) -> ShardTensorSpec:
    """Returns a layout on a merged mesh as the same layout on the mesh whose dims were merged."""
    for group in spec.groups:
        mesh_dims = [m for i in group for m in groups[i]]
        if mesh_dims != sorted(mesh_dims):
            raise NotImplementedError(
                f"{spec.placements[group[0]]!r} over dims {mesh_dims} of {mesh}, in this order: redistribute() the "
                "operand to a layout with each tensor dim on one mesh dim first"
            )
    index = {m: i for i, group in enumerate(groups) for m in group}
    order = [index[m] for m in range(mesh.ndim)]
    return make_spec(mesh, [spec.placements[i] for i in order], spec.shape, [spec.sizes[i] for i in order])


def chunk_sizes(size: int, count: int, *inner: int) -> tuple[int, ...]:
    """Returns the sizes of `torch.chunk`, with empty shards at the end: 7 over 4 is (2, 2, 2, 1).

    Args:
        inner: each chunk is cut into so many in its turn.
    """
    full = -(-size // count)
    sizes = tuple(max(0, min(full, size - index * full)) for index in range(count))
    return tuple(part for chunk in sizes for part in chunk_sizes(chunk, *inner)) if inner else sizes


def joined_sizes(
    mesh: DeviceMesh, mesh_dim: int, sizes: Sequence[int], joining: Sequence[int], block: int = 1
) -> tuple[int, ...]:
    """Returns the sizes of the shards of a dim that `mesh_dim` shards in `sizes`, when other mesh dims shard it, too.

    Each shard is cut into chunks where `mesh_dim` is the first of them; else the dim is.

    Args:
        block: positions between two bounds that are allowed.
    """
    blocks, counts = [size // block for size in sizes], [mesh.shape[m] for m in joining]
    if mesh_dim < min(joining):
        return tuple(part * block for size in blocks for part in chunk_sizes(size, *counts))
    return tuple(part * block for part in chunk_sizes(sum(blocks), mesh.shape[mesh_dim], *counts))

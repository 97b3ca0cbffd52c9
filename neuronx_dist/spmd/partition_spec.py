"""Types of a whole tensor as values: `PartitionSpec` (dim -> axes), `SpmdType` (both forms), and what converts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from . import declarations
from .axes import atoms_of, order_of
from .errors import SpmdTypeError
from .tensor_type import note_of
from .types import LocalType, Shard, V
from .types import SpmdType as AxisType
from .watching import active

__all__ = [
    "DimSharding",
    "LocalSpmdType",
    "PartitionSpec",
    "PerMeshAxisLocalSpmdType",
    "PerMeshAxisSpmdType",
    "PerMeshAxisSpmdTypes",
    "SpmdType",
    "TensorSharding",
    "assert_merged",
    "by_axis",
    "get_partition_spec",
    "merge_types",
    "mesh_here",
    "normalize_partition_spec",
]

# Names of spmd_types for annotations.
PerMeshAxisLocalSpmdType = LocalType
#: The type of a tensor on one axis.
PerMeshAxisSpmdType = LocalType | Shard
#: Types on several axes.
PerMeshAxisSpmdTypes = dict[Any, LocalType | Shard]
#: Types on several axes, of one rank's view.
LocalSpmdType = dict[Any, LocalType]
#: Axes over which a dim is sharded: None, a name, or several.
DimSharding = None | str | Sequence[str]

_Tensors = TypeVar("_Tensors", torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, ...])


class PartitionSpec(tuple[Any, ...]):
    """For each dim of a tensor the axes that shard it: None, an axis, or a tuple of axes, the outermost first.

    `PartitionSpec(("dp", "cp"), None, "tp")`. The axes of one dim stand in the order of the mesh.
    """

    def __new__(cls, *entries: Any) -> PartitionSpec:
        for dim, entry in enumerate(entries):
            if isinstance(entry, tuple) and not entry:
                raise ValueError(f"PartitionSpec: dim {dim} has an empty tuple; None is a dim that no axis shards")
        return super().__new__(cls, entries)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    def __repr__(self) -> str:
        return f"PartitionSpec({', '.join(map(repr, self))})"

    def axes_with_partition_spec(self) -> set[Any]:
        """Returns all axes that shard a dim."""
        return {axis for entry in self for axis in _axes(entry)}


class TensorSharding(tuple[Any, ...]):
    """The sharding of a tensor at a module's boundary: for each dim None, a mesh dim's name, or a tuple of names."""

    def __new__(cls, *entries: Any) -> TensorSharding:
        return super().__new__(cls, entries)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)


@dataclass
class SpmdType:
    """The type of a tensor: axis -> type, and optionally the sharded dims.

    Raises:
        SpmdTypeError: both state sharded dims, or the spec shards over an axis of another type than V.
    """

    local_type: Mapping[Any, AxisType]
    partition_spec: PartitionSpec | None = None

    def __post_init__(self) -> None:
        for axis, spmd_type in self.local_type.items():
            if not isinstance(spmd_type, (LocalType, Shard)):
                raise TypeError(f"SpmdType: {spmd_type!r} on axis {axis!r} is no type: use R, I, V, P or S(dim)")
            if self.partition_spec is None:
                continue
            if isinstance(spmd_type, Shard):
                raise SpmdTypeError(f"SpmdType: S(dim) on {axis!r} together with a PartitionSpec: use one of them")
            if axis in self.partition_spec.axes_with_partition_spec() and spmd_type is not V:
                raise SpmdTypeError(f"SpmdType: the PartitionSpec shards over {axis!r}, which is {spmd_type}, not V")


def _axes(entry: Any) -> tuple[Any, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


def mesh_here() -> Any:
    """Returns the mesh of the active checker, else the current one, None if there is none."""
    mode = active()
    return mode.mesh if mode is not None else declarations._current_mesh()


def normalize_partition_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec in the names that types are written on, without axes of one rank.

    Raises:
        SpmdTypeError: an axis shards two dims, or the axes of a dim are not in the order of the mesh.
    """
    mesh, seen, entries = mesh_here(), set[str](), []
    for dim, entry in enumerate(spec):
        atoms = [atom for axis in _axes(entry) for atom in atoms_of(axis, mesh)]
        if twice := seen.intersection(atoms):
            raise SpmdTypeError(f"{spec}: {', '.join(sorted(twice))} shards two dims of one tensor")
        seen.update(atoms)
        if mesh is not None and sorted(atoms, key=order_of) != atoms:
            in_order = tuple(sorted(atoms, key=order_of))
            raise SpmdTypeError(
                f"{spec}",
                f"dim {dim} is sharded over {', '.join(atoms)}, the outermost first, and the order of the mesh is "
                f"{', '.join(in_order)}: pieces in another order are V",
                repairs=[f"a mesh whose axes are in this order, or PartitionSpec entry {in_order}"],
                rule="partition_spec",
            )
        entries.append(None if not atoms else atoms[0] if len(atoms) == 1 else tuple(atoms))
    return PartitionSpec(*entries)


def get_partition_spec(x: torch.Tensor) -> PartitionSpec | None:
    """Returns the axes that shard each dim of a tensor; None if no sharded dim is known.

    A dim that is sharded in blocks (`S(dim, stride)`) or in part has no entry: a spec cannot say it.
    """
    note = note_of(x)
    if note is None or not note.type.sharded:
        return None
    entries: list[list[str]] = [[] for _ in range(x.dim())]
    for axis, spmd_type in sorted(note.type, key=lambda item: order_of(item[0])):
        if isinstance(spmd_type, Shard) and spmd_type.stride == 1 and spmd_type.part is None:
            entries[spmd_type.dim].append(axis)
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in entries))


def merge_types(*types: Any) -> SpmdType:
    """Merges parts of a type: mappings, `SpmdType`s, `PartitionSpec`s, None, and one type for all other axes.

    Raises:
        SpmdTypeError: two parts contradict each other; one type for all other axes, without a mesh.
        TypeError: two types for all other axes.
    """
    merged: dict[Any, AxisType] = {}
    spec: PartitionSpec | None = None
    default: AxisType | None = None
    for part in types:
        if isinstance(part, (LocalType, Shard)):
            if default is not None:
                raise TypeError(f"merge_types: {default} and {part}: at most one type is for all other axes")
            default = part
            continue
        part_spec = part if isinstance(part, PartitionSpec) else getattr(part, "partition_spec", None)
        if part_spec is not None:
            if spec is not None and spec != part_spec:
                raise SpmdTypeError(f"merge_types: {spec} and {part_spec} contradict each other")
            spec = part_spec
        if part is None or isinstance(part, PartitionSpec):
            continue
        for axis, spmd_type in (part.local_type if isinstance(part, SpmdType) else part).items():
            if merged.setdefault(axis, spmd_type) != spmd_type:
                raise SpmdTypeError(f"merge_types: {axis!r} is {merged[axis]} and {spmd_type}")
    if default is not None:
        mesh = mesh_here()
        if mesh is None:
            raise SpmdTypeError(f"merge_types: {default} for all other axes: there is no mesh, name the axes")
        named = {
            a for axis in (*merged, *(spec or PartitionSpec()).axes_with_partition_spec()) for a in atoms_of(axis, mesh)
        }
        merged.update((atom, default) for atom in atoms_of("world", mesh) if atom not in named)
    return SpmdType(merged, spec)


def by_axis(types: Any) -> Mapping[Any, AxisType] | AxisType:
    """Returns any form of a type as axis -> type, with S(dim) for the dims of a spec."""
    if isinstance(types, (LocalType, Shard, Mapping)):
        return types
    merged = merge_types(*(types if type(types) is tuple else (types,)))
    if merged.partition_spec is None:
        return merged.local_type
    spec = normalize_partition_spec(merged.partition_spec)
    shards = {axis: Shard(dim) for dim, entry in enumerate(spec) for axis in _axes(entry)}
    mesh = mesh_here()
    rest = {
        axis: spmd_type
        for axis, spmd_type in merged.local_type.items()
        if spmd_type is not V or not shards.keys() & set(atoms_of(axis, mesh))
    }
    return {**rest, **shards}


def assert_merged(x: _Tensors, types: Sequence[Any], partition_spec: PartitionSpec | None) -> _Tensors:
    """Declares or asserts the type of a tensor, or of each in a list, in any of the forms of `merge_types`.

    Raises:
        SpmdTypeError: as `assert_type`; a spec of another length than the tensor has dims.
    """
    if not any(not (part is None or isinstance(part, PartitionSpec)) for part in types):
        raise TypeError("assert_type takes a type: a mapping, R, I, V or P; {} beside a PartitionSpec for V alone")
    if isinstance(x, (list, tuple)):
        for item in x:
            assert_merged(item, types, partition_spec)
        return x
    merged = merge_types(*types, partition_spec)
    if merged.partition_spec is not None and len(merged.partition_spec) != x.dim():
        raise SpmdTypeError(
            f"assert_type of a tensor {list(x.shape)}",
            f"{merged.partition_spec} has {len(merged.partition_spec)} entries, and the tensor {x.dim()} dims",
            rule="partition_spec",
        )
    return declarations.assert_type(x, by_axis(merged))

"""The current mesh under the user's names: a DeviceMesh, groups by name, layouts (`MeshAxis`), or sizes by name.

Axes that are a `Mesh` of this package (pp, dp, cp, tp, row-major over all ranks) become one. All others become a
`NamedMesh`, whose names are what types are written on; where one axis is a part of another, both names cannot be used
on one tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations, product
from math import prod
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm import backends, context
from ..comm.context import Context, use
from ..mesh import DENSE_AXES, EXPERT_AXES, Axis, Mesh
from .errors import SpmdTypeError
from .watching import active

__all__ = [
    "MeshAxis",
    "NamedMesh",
    "axes_here",
    "current_mesh",
    "current_mesh_all_names",
    "current_mesh_names",
    "known_axes",
    "normalize_axis",
    "normalize_mesh",
    "set_current_mesh",
]

_CANONICAL = frozenset((*DENSE_AXES, *EXPERT_AXES))


@dataclass(frozen=True)
class MeshAxis:
    """An axis as the layout of its ranks: equal layouts are one axis, whatever group communicates.

    Attributes:
        sizes_and_strides: of nested loops over the ranks, the outermost first; loops of one rank are left out.
    """

    sizes_and_strides: tuple[tuple[int, int], ...]

    @staticmethod
    def of(size_or_group: Any, stride: int | None = None) -> MeshAxis:
        """Returns the axis of a size and a stride, or of a ProcessGroup's ranks.

        Raises:
            ValueError: the ranks of the group lie in no nested loops.
        """
        if isinstance(size_or_group, int):
            return MeshAxis(_merged([(size_or_group, stride or 1)]))
        ranks = sorted(dist.get_process_group_ranks(size_or_group))
        return MeshAxis(_merged(_loops([rank - ranks[0] for rank in ranks])))

    def size(self) -> int:
        """Returns the number of ranks."""
        return prod(size for size, _ in self.sizes_and_strides)

    def names(self) -> frozenset[str]:
        """Returns the names of this axis in the current mesh."""
        return frozenset(name for name, axis in (current_mesh_all_names() or {}).items() if axis == self)

    def isorthogonal(self, *others: MeshAxis) -> bool:
        """Returns whether these axes are independent directions of one grid."""
        loops = sorted((stride, size) for axis in (self, *others) for size, stride in axis.sizes_and_strides)
        return all(low * size <= high and high % (low * size) == 0 for (low, size), (high, _) in zip(loops, loops[1:]))

    def offsets(self) -> list[int]:
        """Returns the distances of the ranks of a group from its first one, in order."""
        ranges = [range(0, size * stride, stride) for size, stride in self.sizes_and_strides]
        return [sum(offsets) for offsets in product(*ranges)]

    def coordinate(self, rank: int) -> int:
        """Returns the index of a rank in its group."""
        index = 0
        for size, stride in self.sizes_and_strides:
            index = index * size + rank // stride % size
        return index

    def __repr__(self) -> str:
        name = min(self.names(), default="")
        return name or f"MeshAxis({', '.join(f'{size}:{stride}' for size, stride in self.sizes_and_strides) or '1'})"


def _merged(loops: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns loops without those of one rank, and with neighbours merged where together they are one loop."""
    merged: list[tuple[int, int]] = []
    for size, stride in loops:
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            merged[-1] = merged[-1][0] * size, stride
        else:
            merged.append((size, stride))
    return tuple(merged)


def _loops(offsets: Sequence[int]) -> list[tuple[int, int]]:
    if len(offsets) == 1:
        return []
    stride = offsets[1]
    size = next((n for n, offset in enumerate(offsets) if offset != n * stride), len(offsets))
    inner = [n * stride for n in range(size)]
    outer = list(offsets[::size])
    if len(offsets) % size or any(
        list(offsets[i : i + size]) != [outer[i // size] + n for n in inner] for i in range(0, len(offsets), size)
    ):
        raise ValueError(f"ranks at distances {list(offsets)} lie along no axis of a grid")
    return [*_loops(outer), (size, stride)]


@dataclass(frozen=True)
class NamedMesh(Mesh):
    """A mesh of axes with any names and layouts. The axes of `Mesh` that it does not have are of one rank.

    Attributes:
        axes: name and layout of each, the outermost first.
        named_atoms: the atoms of each name, in this order: the name, or none for an axis of one rank.
    """

    axes: tuple[tuple[str, MeshAxis], ...] = ()
    named_atoms: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, world_size: int, axes: Mapping[str, MeshAxis]) -> NamedMesh:
        atoms = {name: (name,) if axis.size() > 1 else () for name, axis in axes.items()}
        atoms.update((name, ()) for name in _CANONICAL if name not in axes)
        return cls(world_size, 1, 1, 1, 1, "linear", None, 1, tuple(axes.items()), atoms)

    def layout(self, name: str) -> MeshAxis:
        """Returns the layout of one axis."""
        return dict(self.axes).get(name) or MeshAxis(())

    def axis_of(self, ranks: Sequence[int]) -> Axis | None:
        names = [name for name, axis in self.axes if axis.size() > 1]
        for count in range(1, len(names) + 1):
            for merged in combinations(names, count):
                if self.size(merged) == len(ranks) and sorted(self._group_at(merged, ranks[0])) == sorted(ranks):
                    return merged
        return None

    def coordinates(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks")
        return {**dict.fromkeys(_CANONICAL, 0), **{name: axis.coordinate(rank) for name, axis in self.axes}}

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        return tuple(self._group_at(self._atoms(axis), rank))

    def groups(self, axis: Axis) -> Any:
        names = self._atoms(axis)
        return [[*g] for g in dict.fromkeys(tuple(self._group_at(names, rank)) for rank in range(self.world_size))]

    def _group_at(self, names: Sequence[str], rank: int) -> list[int]:
        axes = [self.layout(name) for name in names]
        first = rank - sum(axis.offsets()[axis.coordinate(rank)] for axis in axes)
        return [first + sum(offsets) for offsets in product(*(axis.offsets() for axis in axes))]

    def _atoms(self, axis: Axis) -> tuple[str, ...]:
        if axis == "world":
            return tuple(name for name, _ in self.axes)
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in names:
            if name not in self.named_atoms:
                raise ValueError(f"no axis {name!r} in the current mesh; it has {', '.join(dict(self.axes))}")
        return names

    def _length(self, name: str) -> int:
        return self.layout(name).size()

    def __str__(self) -> str:
        return f"NamedMesh({' × '.join(f'{name}={axis.size()}' for name, axis in self.axes)})"


class _NamedContext(Context):
    """A place in a mesh whose axes and groups the user made."""

    def __init__(self, mesh: Mesh, rank: int, backend: Any, axes: Mapping[str, MeshAxis], groups: Mapping[str, Any]):
        super().__init__(mesh, rank, backend)
        self.axes, self.groups = dict(axes), dict(groups)
        self.local_axes: tuple[str, ...] = ()

    def communicator(self, axis: Any) -> Any:
        if isinstance(axis, MeshAxis):
            axis = next((name for name, layout in self.axes.items() if layout == axis), axis)
            if isinstance(axis, MeshAxis):
                raise SpmdTypeError(f"{axis} is no axis of the current mesh, which has {', '.join(self.axes)}")
        if isinstance(axis, str) and axis in self.groups and axis not in self._communicators:
            communicator = super().communicator(self.groups[axis])
            communicator.axis, communicator.axis_sizes = axis, self.mesh.sizes(axis)
            self.register(axis, communicator)
        return super().communicator(axis)


_local = threading.local()  # .stack: the contexts that `set_current_mesh` has entered in this thread


def _entered() -> list[_NamedContext]:
    stack: list[_NamedContext] = _local.__dict__.setdefault("stack", [])
    return stack


@contextmanager
def set_current_mesh(axes: Any = None, *, local_axes: Sequence[Any] = ()) -> Iterator[None]:
    """Makes a mesh the current one of this thread: its names are the axes of types and of operators.

    Args:
        axes: a DeviceMesh with named dims; name -> MeshAxis, ProcessGroup or size (of sizes: row-major, the last axis
            fastest); a set of MeshAxis or a list of groups; None: the current one.
        local_axes: axes along which shards are this rank's own tensors: S is V there, as inside of `local_map`.

    Raises:
        SpmdTypeError: the axes are no independent directions of one grid.
        RuntimeError: None, and there is no current mesh.
    """
    named = axes_here() if axes is None else None
    if axes is None and named is None:
        raise RuntimeError("set_current_mesh(): there is no current mesh; pass one")
    layouts, groups = (named, {}) if named is not None else _resolved(axes)
    if axes is None and _entered():
        groups = _entered()[-1].groups
    independent = [axis for axis in layouts.values() if axis.size() > 1]
    if len(independent) > 1 and not independent[0].isorthogonal(*independent[1:]):
        raise SpmdTypeError(
            f"set_current_mesh({layouts})",
            "axes of one mesh are independent directions of one grid, and these overlap",
            repairs=["one mesh for each view, and spmd.reinterpret_mesh between them"],
        )
    if context.is_initialized():
        rank, backend, world = context.current().rank, context.current().backend, context.current().mesh.world_size
    elif dist.is_initialized():
        rank, backend, world = dist.get_rank(), backends.c10d.C10dBackend(), dist.get_world_size()
    else:
        rank, backend = 0, backends.shapes.ShapesBackend()
        world = max((axis.offsets()[-1] for axis in independent), default=0) + 1
        world = max([world, *(size * stride for axis in independent for size, stride in axis.sizes_and_strides)])
    here = _NamedContext(_mesh_of(layouts, world), rank, backend, layouts, groups)
    here.local_axes = tuple(_name_of(axis, layouts) for axis in local_axes)
    mode: Any = active()
    with ExitStack() as stack:
        stack.enter_context(use(here))
        _entered().append(here)
        stack.callback(_entered().pop)
        if mode is not None:
            before = mode.mesh
            stack.callback(_switch, mode, before)
            stack.callback(setattr, mode, "local_axes", mode.local_axes)
            _switch(mode, here.mesh)
            mode.local_axes = here.local_axes
            if here.local_axes:
                stack.enter_context(mode.local_scope(here.local_axes))
        yield


def _switch(mode: Any, mesh: Mesh | None) -> None:
    mode.mesh = mesh
    mode.known.clear()


def _name_of(axis: Any, layouts: Mapping[str, MeshAxis]) -> str:
    layout = axis if isinstance(axis, MeshAxis) else None
    if layout is None and not isinstance(axis, str):
        layout = MeshAxis.of(axis)
    name = axis if layout is None else next((name for name, known in layouts.items() if known == layout), None)
    if name not in layouts:
        raise ValueError(f"local_axes: {axis!r} is no axis of this mesh, which has {', '.join(layouts)}")
    return str(name)


def _resolved(axes: Any) -> tuple[dict[str, MeshAxis], dict[str, Any]]:
    """Returns layouts and groups by name."""
    if isinstance(axes, DeviceMesh):
        if not axes.mesh_dim_names:
            raise ValueError("set_current_mesh: the DeviceMesh has no mesh_dim_names, which types are written on")
        axes = {name: axes.get_group(name) for name in axes.mesh_dim_names}
    if not isinstance(axes, Mapping):
        axes = {_label(axis): axis for axis in axes}
    if all(isinstance(size, int) for size in axes.values()):
        strides = [prod([*axes.values()][position + 1 :]) for position in range(len(axes))]
        return {name: MeshAxis.of(size, stride) for (name, size), stride in zip(axes.items(), strides)}, {}
    layouts = {name: axis if isinstance(axis, MeshAxis) else MeshAxis.of(axis) for name, axis in axes.items()}
    return layouts, {name: axis for name, axis in axes.items() if not isinstance(axis, MeshAxis)}


def _label(axis: Any) -> str:
    if isinstance(axis, MeshAxis):
        return f"axis({', '.join(f'{size}:{stride}' for size, stride in axis.sizes_and_strides) or '1'})"
    description: str = axis.group_desc
    return description.removeprefix("mesh_")


def _mesh_of(layouts: Mapping[str, MeshAxis], world: int) -> Mesh:
    """Returns the `Mesh` that has these axes, else a `NamedMesh`."""
    sizes = {name: axis.size() for name, axis in layouts.items()}
    if set(layouts) <= set(DENSE_AXES):
        tp, pp, cp = sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("cp", 1)
        if world % (tp * pp * cp) == 0:
            mesh = Mesh(world, tp=tp, pp=pp, cp=cp)
            if all(_axis_in(mesh, name) == axis for name, axis in layouts.items()) and mesh.dp == sizes.get("dp", 1):
                return mesh
    outer_first = sorted(layouts.items(), key=lambda item: -max((s for _, s in item[1].sizes_and_strides), default=0))
    return NamedMesh.of(world, dict(outer_first))


def _axis_in(mesh: Mesh, name: str) -> MeshAxis:
    ranks = sorted(mesh.group_of(name, 0))
    return MeshAxis(_merged(_loops([rank - ranks[0] for rank in ranks])))


def axes_here() -> dict[str, MeshAxis] | None:
    """Returns all axes of the current mesh by name, those of one rank included; None: there is none."""
    if _entered():
        return dict(_entered()[-1].axes)
    if not context.is_initialized():
        return None
    mesh = context.current().mesh
    return {name: _axis_in(mesh, name) for name in DENSE_AXES}


current_mesh_all_names = axes_here


def known_axes() -> dict[str, MeshAxis]:
    """Returns the axes of all meshes that are entered in this thread, by name; of two of one name the inner one."""
    return {name: axis for entered in _entered() for name, axis in entered.axes.items()} or axes_here() or {}


def current_mesh_names() -> dict[str, MeshAxis] | None:
    """Returns the axes of the current mesh that have more than one rank, by name."""
    axes = axes_here()
    return None if axes is None else {name: axis for name, axis in axes.items() if axis.size() > 1}


def current_mesh() -> frozenset[MeshAxis] | None:
    """Returns the axes of the current mesh that have more than one rank."""
    axes = current_mesh_names()
    return None if axes is None else frozenset(axes.values())


def normalize_axis(axis: Any) -> MeshAxis:
    """Returns the layout of an axis: a name, looked up in the current mesh, a ProcessGroup, or a MeshAxis.

    Raises:
        SpmdTypeError: no such name in the current mesh.
    """
    if isinstance(axis, MeshAxis):
        return axis
    if not isinstance(axis, str):
        return MeshAxis.of(axis)
    axes = axes_here()
    if axes is None or axis not in axes:
        known = "there is no current mesh" if axes is None else f"the current mesh has {', '.join(axes)}"
        raise SpmdTypeError(f"no axis {axis!r}: {known}")
    return axes[axis]


def normalize_mesh(axes: frozenset[MeshAxis]) -> frozenset[MeshAxis]:
    """Returns the axes of more than one rank.

    Raises:
        SpmdTypeError: they are no independent directions of one grid.
    """
    independent = [axis for axis in axes if axis.size() > 1]
    if len(independent) > 1 and not independent[0].isorthogonal(*independent[1:]):
        raise SpmdTypeError(f"{independent} are no independent directions of one grid")
    return frozenset(independent)

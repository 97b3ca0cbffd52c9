"""Mesh: named axes over the ranks of a job. Pure Python, no torch.

The grid is row-major with the last axis fastest. The same ranks have two views:

    dense view    (pp, dp,  cp, tp)      dp  = world / (tp * pp * cp)
    expert view   (pp, edp, ep, tp)      edp = world / (tp * pp * ep)

so that tp ranks are neighbours and pp ranks are farthest apart, and `edp` spans dp and cp when ep is 1. An axis has
parts, named by the coordinate along them: `"tp%4"` is four adjacent tp ranks, `"tp/4"` every fourth one, `"tp/4%2"` two
ranks at a distance of four. This is the rank order of NeuronX Distributed (`initialize_model_parallel`) and of
Megatron. Nodes of some devices need another order of their ranks on this grid: `topology.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from re import fullmatch
from typing import NamedTuple, overload

from .axis_sizes import size_along, tracking
from .topology import LINEAR, UNITS, fitting_node, place_in_units, place_of, rank_at, rank_in_units

__all__ = ["Axis", "AxisPart", "DENSE_AXES", "EXPERT_AXES", "Groups", "Mesh", "name_of_part", "part_of", "rest_of"]

#: The name of an axis, or a tuple of names: merged axes, outermost first.
Axis = str | tuple[str, ...]

#: Axes of the mesh, outermost first: ranks that differ in tp alone are neighbours.
DENSE_AXES = ("pp", "dp", "cp", "tp")
#: Axes of the expert view of the same ranks: ep is a part of dp, edp the rest of it.
EXPERT_AXES = ("pp", "edp", "ep", "tp")


class AxisPart(NamedTuple):
    """A part of an axis, along which the coordinate is `coordinate // stride % size`; `size` None: without `% size`.

    Parts are digits of the coordinate in a mixed radix: the parts of a tp of 2 x 2 x 2 ranks are `"tp/4"`, `"tp/2%2"`
    and `"tp%2"`.
    """

    axis: str
    stride: int = 1
    size: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.stride == 1 and self.size is None

    def of(self, coordinate: int) -> int:
        """Returns the coordinate along the part, from the coordinate along the axis."""
        coordinate = coordinate if self.stride == 1 else coordinate // self.stride
        return coordinate if self.size is None else coordinate % self.size

    def length(self, length: int) -> int:
        """Returns the number of ranks along the part, from that along the axis."""
        return length // self.stride if self.size is None else self.size

    @property
    def cuts(self) -> tuple[int, ...]:
        """The strides at which the part begins and ends, the larger first, without the ends of the axis."""
        end = () if self.size is None else (self.stride * self.size,)
        return (*end, *((self.stride,) if self.stride > 1 else ()))


@lru_cache(1024)
def part_of(name: str) -> AxisPart:
    """Parses the name of a part of an axis: `"tp/4%2"` is `AxisPart("tp", 4, 2)`.

    A name of another form is a whole axis: `AxisPart("dp")`.
    """
    match = fullmatch(r"(.*?)(?:/(\d+))?(?:%(\d+))?", name)
    assert match is not None
    return AxisPart(match[1], int(match[2] or 1), None if match[3] is None else int(match[3]))


def name_of_part(axis: str, stride: int, size: int | None) -> str:
    """Returns the name of a part; `size` None: the outermost one."""
    return axis + (f"/{stride}" if stride > 1 else "") + ("" if size is None else f"%{size}")


def rest_of(*names: str) -> Axis:
    """Returns the other parts of an axis: beside "tp/4%2" there are `("tp/8", "tp%4")`, beside "tp%4" is "tp/4"."""
    rest = _rest_of(names)
    return rest[0] if len(rest) == 1 else rest


def _rest_of(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the other parts of the axis of these parts, outermost first, as few as possible."""
    rest: list[str] = []
    end: int | None = 1
    for axis, stride, size in sorted(map(part_of, names), key=lambda part: (part.stride, part.size is None)):
        if end is not None and stride > end:
            rest.append(name_of_part(axis, end, stride // end))
        end = None if size is None else stride * size
    if end is not None:
        rest.append(name_of_part(part_of(names[0]).axis, end, None))
    return tuple(reversed(rest))


@dataclass(frozen=True)
class Mesh:
    """A grid of `world_size` ranks; `dp` and `edp` are the quotients by the other sizes.

    An axis is a name (`"tp"`), a part of one (`"tp%4"`, `"tp/4"`, `"tp/4%2"`), a tuple of names of one view
    (`("dp", "cp")`: merged, the first outermost; parts of one axis must not overlap), `"world"` (all ranks, in the
    order of their numbers), or the empty tuple (a group of one).

    `tp_replicas` concerns only types: with 4 they are written on `"tp/4"` and `"tp%4"` in place of `"tp"`, with (4, 2)
    on `"tp/4"`, `"tp/2%2"` and `"tp%2"` (`tp_parts`).

    `topology` is the order in which ranks fill the grid: "linear", or that of a device ("trn1", "trn2"), whose nodes
    have `ranks_per_node` ranks (None: the number of the usual instance; other orders ignore it), or "units":
    the ranks of one model replica are adjacent.

    Raises:
        ValueError: a size is not positive, the sizes do not divide the world (nothing is clamped), there is no such
            topology, or it is not for these sizes.
    """

    def __new__(cls, *args: object, **kwargs: object) -> Mesh:
        """Raises TypeError for an unknown keyword, with the list of keywords."""
        for name, value in kwargs.items():
            if name not in cls.__annotations__:
                known = ", ".join(cls.__annotations__)
                implied = "follows from the others" if name in ("dp", "edp") else "is no size of a mesh"
                raise TypeError(
                    f"Mesh({name}={value!r}): {name} {implied}; there are {known}, "
                    "and dp is world_size / (tp * pp * cp), edp is world_size / (tp * pp * ep)"
                )
        return super().__new__(cls)

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    topology: str = LINEAR
    ranks_per_node: int | None = None
    tp_replicas: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        cuts = self.tp_replicas if isinstance(self.tp_replicas, tuple) else (self.tp_replicas,)
        given = [(name, getattr(self, name)) for name in ("world_size", "tp", "pp", "cp", "ep")]
        for name, size in [*given, *(("tp_replicas", cut) for cut in cuts)]:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh: {name} must be a positive integer, got {size!r}")
        for label, names in (("data", ("tp", "pp", "cp")), ("expert data", ("tp", "pp", "ep"))):
            sizes = [getattr(self, name) for name in names]
            model = sizes[0] * sizes[1] * sizes[2]
            if self.world_size % model:
                product_text = " * ".join(f"{name}={size}" for name, size in zip(names, sizes))
                launch = f" (neuronx-dist run --nproc-per-node {model} script.py)" if self.world_size == 1 else ""
                raise ValueError(
                    f"invalid implied {label} parallel degree: world size {self.world_size} is not divisible by "
                    f"{product_text} = {model}; use a world size that is a multiple of {model}{launch}, or smaller "
                    "degrees"
                )
        for whole, cut in pairwise((self.tp, *cuts)):
            if whole % cut:
                of = f"tp={self.tp}" if whole is self.tp else f"{whole}, the size before it"
                raise ValueError(f"mesh: tp_replicas={self.tp_replicas}: {cut} does not divide {of}")
        cuts = tuple(dict.fromkeys(cut for cut in cuts if cut > 1))
        object.__setattr__(self, "tp_replicas", cuts if len(cuts) > 1 else cuts[0] if cuts else 1)
        node = fitting_node(self.topology, self.ranks_per_node, world_size=self.world_size, tp=self.tp, ep=self.ep)
        object.__setattr__(self, "ranks_per_node", node)

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.tp * self.pp * self.ep)

    @property
    def tp_parts(self) -> tuple[str, ...]:
        """The parts of tp that types are written on, outermost first; `("tp",)`: tp is not divided for types."""
        cuts = self.tp_replicas if isinstance(self.tp_replicas, tuple) else (self.tp_replicas,)
        if cuts == (1,):
            return ("tp",)
        inner = [name_of_part("tp", cut, end // cut) for end, cut in pairwise((*cuts, 1))]
        return (name_of_part("tp", cuts[0], None), *inner)

    def size(self, axis: Axis) -> int:
        """Number of ranks in a group along `axis`; under a checker an int that knows its axis (`axis_sizes.py`)."""
        total = 1
        for name in self._atoms(axis):
            total *= self._length(name)
        return size_along(self.sizes(axis), total) if tracking() else total

    def sizes(self, axis: Axis) -> dict[str, int]:
        """Returns the single axes that `axis` consists of, with the number of ranks along each."""
        return {name: self._length(name) for name in self._atoms(axis)}

    def axis_of(self, ranks: Sequence[int]) -> Axis | None:
        """Returns the axis that has a group of these ranks, in any order; None if there is none."""
        merged = [names for n in range(1, len(DENSE_AXES) + 1) for names in combinations(DENSE_AXES, n)]
        of_tp = self.tp_parts
        parts = [names for n in range(1, len(of_tp)) for names in combinations(of_tp, n)]
        for names in (*merged, ("edp",), ("ep",), ("pp", "ep", "tp"), *parts):
            if self.size(names) == len(ranks) and sorted(self.group_of(names, ranks[0])) == sorted(ranks):
                return names
        return None

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a global rank on every axis of both views."""
        knows = getattr(rank, "mesh_coordinates", None)  # a rank whose reads are reported: comm/ranks/rank_values.py
        if knows is not None and (known := knows(self)) is not None:
            return known
        place = self.place(rank)
        result: dict[str, int] = {}
        for view in (DENSE_AXES, EXPERT_AXES):
            rest = place
            for name in reversed(view):
                rest, result[name] = divmod(rest, getattr(self, name))
        return result

    def coordinate(self, axis: Axis, rank: int) -> int:
        """Index of a global rank within its group along `axis`."""
        coordinates = self.coordinates(rank)
        return rank if axis == "world" else _flat(self, self._atoms(axis), coordinates)

    def place(self, rank: int) -> int:
        """Returns the place of a global rank in the grid, counted row-major over the dense axes."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks (0..{self.world_size - 1})")
        if self.topology == UNITS:
            return place_in_units(rank, world_size=self.world_size, dp=self.dp, pp=self.pp)
        return rank if self.ranks_per_node is None else place_of(self.topology, self.ranks_per_node, rank)

    def rank_at_place(self, place: int) -> int:
        """Returns the global rank at a place of the grid; see `place`."""
        if self.topology == UNITS:
            return rank_in_units(place, world_size=self.world_size, dp=self.dp, pp=self.pp)
        return place if self.ranks_per_node is None else rank_at(self.topology, self.ranks_per_node, place)

    def groups(self, axis: Axis) -> Groups:
        """Returns all replica groups along `axis`, a partition of the world: lists of ranks in axis order."""
        return Groups(self, axis)

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """Returns the replica group along `axis` that holds `rank`."""
        knows = getattr(rank, "mesh_group", None)
        if knows is not None and (known := knows(self, axis)) is not None:
            return known
        return tuple(self.groups(axis).of(rank))

    def _atoms(self, axis: Axis) -> tuple[str, ...]:
        """Returns the single names of an axis, outermost first."""
        if axis == "world":
            return DENSE_AXES
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        parts = [part_of(name) for name in names]
        wholes = {part.axis for part in parts}
        for name in wholes:
            if name not in DENSE_AXES and name not in EXPERT_AXES:
                known = ", ".join(dict.fromkeys(DENSE_AXES + EXPERT_AXES))
                raise ValueError(f"unknown mesh axis {name!r}; the axes are {known}, world, or a tuple of them")
        for name, (whole, stride, size) in zip(names, parts):
            count = stride if size is None else stride * size
            if count < 1 or getattr(self, whole) % count:
                raise ValueError(f"mesh axis {name!r}: {count} does not divide {whole}={getattr(self, whole)}")
        ordered = sorted(zip(parts, names), key=lambda pair: (pair[0].axis, pair[0].stride))
        for (part, name), (other, other_name) in pairwise(ordered):
            if part.axis == other.axis and (other.stride % (part.stride * self._length(name)) or name == other_name):
                raise ValueError(f"mesh axis {axis!r} names one axis twice")
        if not (wholes <= set(DENSE_AXES) or wholes <= set(EXPERT_AXES)):
            raise ValueError(
                f"axes {axis!r} mix the dense view {DENSE_AXES} with the expert view {EXPERT_AXES}; merge within one"
            )
        return names

    def _length(self, name: str) -> int:
        """Returns the number of ranks along one axis, or a part of one."""
        part = part_of(name)
        return part.length(getattr(self, part.axis))

    def __str__(self) -> str:
        names = [name for name in (*DENSE_AXES, "ep", "edp") if name in ("pp", "dp", "tp") or getattr(self, name) > 1]
        if self.ep == 1:
            names = [name for name in names if name not in ("ep", "edp")]
        sizes = " × ".join(f"{name}={getattr(self, name)}" for name in names)
        order = "" if self.topology == LINEAR else f", {self.topology} order"
        order += "" if self.ranks_per_node is None else f" in nodes of {self.ranks_per_node}"
        return f"Mesh({sizes}{order})"


class Groups(Sequence[list[int]]):
    """The replica groups of a mesh along an axis: a sequence of lists, equal to the list of these lists.

    The size of the object does not depend on the number of ranks: a group is computed on access.

    Attributes:
        mesh, axis: the mesh and the axis of the groups.
        names: the axis as single names, outermost first.
        others: the other axes of the same view; for parts of an axis also its other parts.
        strides: distance between the places of neighbours along each of `names` and `others`.
    """

    def __init__(self, mesh: Mesh, axis: Axis) -> None:
        self.mesh = mesh
        self.axis = axis
        self.names = mesh._atoms(axis)
        parts: dict[str, list[str]] = {}
        for name in self.names:
            parts.setdefault(part_of(name).axis, []).append(name)
        view = DENSE_AXES if parts.keys() <= set(DENSE_AXES) else EXPERT_AXES
        self.strides: dict[str, int] = {}
        self.others: tuple[str, ...] = ()
        stride = 1
        for axis_name in reversed(view):
            inside = parts.get(axis_name, [])
            others = _rest_of(inside) if inside else (axis_name,)
            self.strides.update((name, stride * part_of(name).stride) for name in (*inside, *others))
            self.others = (*others, *self.others)
            stride *= getattr(mesh, axis_name)

    def of(self, rank: int) -> list[int]:
        """Returns the group that holds `rank`."""
        at = self.mesh.coordinates(rank)
        return self._group(sum(_along(name, at) * self.strides[name] for name in self.others))

    @cached_property
    def offsets(self) -> list[int]:
        """Offsets of the places of a group's ranks from the first."""
        return [self._offset(index, self.names) for index in range(self.mesh.size(self.names))]

    def _group(self, first: int) -> list[int]:
        if self.axis == "world":
            return list(range(self.mesh.world_size))
        return [self.mesh.rank_at_place(first + offset) for offset in self.offsets]

    def _offset(self, index: int, names: Sequence[str]) -> int:
        offset = 0
        for name in reversed(names):
            index, coordinate = divmod(index, self.mesh._length(name))
            offset += coordinate * self.strides[name]
        return offset

    def __len__(self) -> int:
        return self.mesh.size(self.others)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._group(self._offset(range(len(self))[index], self.others))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Groups) and (self.mesh, self.axis) == (other.mesh, other.axis):
            return True
        if not isinstance(other, (list, Groups)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr([*self])


def _flat(mesh: Mesh, names: Sequence[str], coordinates: Mapping[str, int]) -> int:
    """Returns the index of these coordinates in the product of some axes, the last fastest."""
    index = 0
    for name in names:
        index = index * mesh._length(name) + _along(name, coordinates)
    return index


def _along(name: str, coordinates: Mapping[str, int]) -> int:
    """Returns the coordinate along one axis, or a part of one."""
    part = part_of(name)
    return part.of(coordinates[part.axis])

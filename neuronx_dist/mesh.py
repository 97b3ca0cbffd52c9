"""Which ranks are where: named axes over the ranks of a job. Pure Python, no torch.

The grid is row-major with the last axis fastest. The same ranks are seen in two views:

    dense view    (pp, dp,  cp, tp)      dp  = world / (tp * pp * cp)
    expert view   (pp, edp, ep, tp)      edp = world / (tp * pp * ep)

so that tp ranks are neighbours and pp ranks are farthest apart, and `edp` spans dp and cp when ep is 1. This is the
rank order of NeuronX Distributed (`initialize_model_parallel`) and of Megatron. Nodes of some devices want their ranks
in another order on this grid: `topology.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

from .axis_sizes import size_along, tracking
from .topology import LINEAR, fitting_node, place_of, rank_at

__all__ = ["Axis", "DENSE_AXES", "EXPERT_AXES", "Mesh"]

Axis = str | tuple[str, ...]

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "tp")


@dataclass(frozen=True)
class Mesh:
    """A grid of `world_size` ranks; `dp` and `edp` are what the other sizes leave.

    An axis is a name (`"tp"`), a tuple of names of one view (`("dp", "cp")`: merged, the first outermost), `"world"`
    (all ranks, in the order of their numbers), or the empty tuple (a group of one).

    `topology` is the order in which ranks fill the grid: "linear", or that of a device ("trn1", "trn2"), whose nodes
    have `ranks_per_node` ranks (None: those of the usual instance; "linear" has no use for it).

    Raises:
        ValueError: a size is not positive, the sizes do not divide the world (nothing is clamped), there is no such
            topology, or it is not for these sizes.
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    topology: str = LINEAR
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        for name in ("world_size", "tp", "pp", "cp", "ep"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"mesh: {name} must be a positive integer, got {size!r}")
        for label, names in (("data", ("tp", "pp", "cp")), ("expert data", ("tp", "pp", "ep"))):
            sizes = [getattr(self, name) for name in names]
            model = sizes[0] * sizes[1] * sizes[2]
            if self.world_size % model:
                product_text = " * ".join(f"{name}={size}" for name, size in zip(names, sizes))
                raise ValueError(
                    f"invalid implied {label} parallel degree: world size {self.world_size} is not divisible by "
                    f"{product_text} = {model}; use a world size that is a multiple of {model}, or smaller degrees"
                )
        node = fitting_node(self.topology, self.ranks_per_node, world_size=self.world_size, tp=self.tp, ep=self.ep)
        object.__setattr__(self, "ranks_per_node", node)

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def edp(self) -> int:
        return self.world_size // (self.tp * self.pp * self.ep)

    def size(self, axis: Axis) -> int:
        """Number of ranks in a group along `axis`. While a checker is at work, it knows that (`axis_sizes.py`)."""
        total = 1
        for name in self._atoms(axis):
            total *= getattr(self, name)
        return size_along(self.sizes(axis), total) if tracking() else total

    def sizes(self, axis: Axis) -> dict[str, int]:
        """The single axes that `axis` consists of, with the number of ranks along each."""
        return {name: getattr(self, name) for name in self._atoms(axis)}

    def axis_of(self, ranks: Sequence[int]) -> Axis | None:
        """The axis of which a group has these ranks, in any order; None: they are no group of an axis."""
        merged = [names for n in range(1, len(DENSE_AXES) + 1) for names in combinations(DENSE_AXES, n)]
        for names in (*merged, ("edp",), ("ep",), ("pp", "ep", "tp")):
            if self.size(names) == len(ranks) and sorted(self.group_of(names, ranks[0])) == sorted(ranks):
                return names
        return None

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a global rank on every axis of both views."""
        knows = getattr(rank, "mesh_coordinates", None)  # a rank whose reads are noted: comm/rank_values.py
        if knows is not None and (known := knows(self)) is not None:
            return known
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in a world of {self.world_size} ranks (0..{self.world_size - 1})")
        position = rank if self.ranks_per_node is None else place_of(self.topology, self.ranks_per_node, rank)
        result: dict[str, int] = {}
        for view in (DENSE_AXES, EXPERT_AXES):
            rest = position
            for name in reversed(view):
                rest, result[name] = divmod(rest, getattr(self, name))
        return result

    def coordinate(self, axis: Axis, rank: int) -> int:
        """Index of a global rank within its group along `axis`."""
        coordinates = self.coordinates(rank)
        if axis == "world":
            return rank
        index = 0
        for name in self._atoms(axis):
            index = index * getattr(self, name) + coordinates[name]
        return index

    def groups(self, axis: Axis) -> list[list[int]]:
        """All replica groups along `axis`, together the world: lists of global ranks in the order of the axis."""
        return [list(group) for group in self._groups(axis)]

    def group_of(self, axis: Axis, rank: int) -> tuple[int, ...]:
        """The replica group along `axis` that holds `rank`."""
        knows = getattr(rank, "mesh_group", None)
        if knows is not None and (known := knows(self, axis)) is not None:
            return known
        self.coordinates(rank)
        return next(group for group in self._groups(axis) if rank in group)

    def _groups(self, axis: Axis) -> Sequence[tuple[int, ...]]:
        return (tuple(range(self.world_size)),) if axis == "world" else _groups(self, self._atoms(axis))

    def _atoms(self, axis: Axis) -> tuple[str, ...]:
        """The axis as single names, outermost first."""
        if axis == "world":
            return DENSE_AXES
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in names:
            if name not in DENSE_AXES and name not in EXPERT_AXES:
                known = ", ".join(dict.fromkeys(DENSE_AXES + EXPERT_AXES))
                raise ValueError(f"unknown mesh axis {name!r}; the axes are {known}, world, or a tuple of them")
        if len(set(names)) != len(names):
            raise ValueError(f"mesh axis {axis!r} names one axis twice")
        if not (set(names) <= set(DENSE_AXES) or set(names) <= set(EXPERT_AXES)):
            raise ValueError(
                f"axes {axis!r} mix the dense view {DENSE_AXES} with the expert view {EXPERT_AXES}; merge within one"
            )
        return names

    def __str__(self) -> str:
        names = [name for name in (*DENSE_AXES, "ep", "edp") if name in ("pp", "dp", "tp") or getattr(self, name) > 1]
        if self.ep == 1:
            names = [name for name in names if name not in ("ep", "edp")]
        sizes = " × ".join(f"{name}={getattr(self, name)}" for name in names)
        order = "" if self.ranks_per_node is None else f", {self.topology} order in nodes of {self.ranks_per_node}"
        return f"Mesh({sizes}{order})"


@lru_cache(maxsize=256)
def _groups(mesh: Mesh, names: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    view: Sequence[str] = DENSE_AXES if set(names) <= set(DENSE_AXES) else EXPERT_AXES
    stride: dict[str, int] = {}
    step = 1
    for name in reversed(view):
        stride[name] = step
        step *= getattr(mesh, name)
    others = [name for name in view if name not in names]

    def offsets(axes: Sequence[str]) -> list[int]:
        return [
            sum(index * stride[name] for index, name in zip(position, axes))
            for position in product(*(range(getattr(mesh, name)) for name in axes))
        ]

    inside, bases, node = offsets(names), offsets(others), mesh.ranks_per_node
    if node is None:
        return tuple(tuple(base + offset for offset in inside) for base in bases)
    return tuple(tuple(rank_at(mesh.topology, node, base + offset) for offset in inside) for base in bases)

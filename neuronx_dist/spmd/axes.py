"""Atoms: the axes that types are written on; every other axis is a product of them.

The dense view (pp, dp, cp, tp) and the expert view (pp, edp, ep, tp) divide the same ranks in two ways. Types need one
set of axes that expresses both: dp and cp, or with experts edp and ep, and where both exist the coarser pieces of
them (`"cp/ep"`: what is left of cp when ep is taken out of it). Where key/value heads are replicated over a part of
tp (`Mesh.tp_replicas`), its parts are atoms: `"tp/4"` and `"tp%4"`. Axes of one rank have no atoms.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from ..comm import context
from ..comm.context import AxisLike
from ..comm.ranks.rank_numbers import concrete
from ..mesh import DENSE_AXES, EXPERT_AXES, Mesh, name_of_part, part_of

__all__ = ["DATA_ATOMS", "SAMPLE_ATOMS", "PartOfAxisError", "atoms_of", "mesh_atoms", "mesh_of", "order_of"]

DATA_ATOMS = frozenset(("dp", "edp", "cp", "cp/ep", "ep/cp"))  # axes along which ranks have different data
# Axes along which a batch is sharded: the assignment of samples to ranks does not matter if all are used equally.
SAMPLE_ATOMS = frozenset(("dp", "edp", "ep", "ep/cp"))

_ORDER = ("pp", "dp", "edp", "cp/ep", "ep/cp", "ep", "cp", "tp")


class PartOfAxisError(ValueError):
    """Types are written on "tp" as a whole, and a layer has replicas over a part of it.

    Attributes:
        replicas: the value that `Mesh.tp_replicas` must have.
    """

    def __init__(self, axis: str, mesh: Mesh) -> None:
        part = part_of(axis)
        self.replicas = part.cuts[0] if len(part.cuts) == 1 else part.cuts
        super().__init__(
            f"types are checked on all of {part.axis}, or on parts of {mesh.tp_replicas}, not on the part {axis!r}: "
            f"pass Mesh(..., tp_replicas={self.replicas}), which must be the same for all layers"
        )


def order_of(atom: str) -> tuple[int, int, str]:
    """Sorts atoms as a mesh has them, outermost first; groups that are no axes come last.

    Where two axes shard one dim in the same blocks, the first one has the outer factor.
    """
    part = part_of(atom)
    if not part.is_whole and part.axis in _ORDER:
        return (_ORDER.index(part.axis), -part.stride, atom)
    order = (*getattr(context.current().mesh, "named_atoms", _ORDER),) if context.is_initialized() else _ORDER
    return (order.index(atom) if atom in order else len(order), 0, atom)


def mesh_of(sizes: Mapping[str, int] | Mesh) -> Mesh:
    """Makes a mesh from the sizes of its axes; missing ones are 1.

    Raises:
        ValueError: an axis does not exist, or the sizes do not fit together.
    """
    if isinstance(sizes, Mesh):
        return sizes
    if not isinstance(sizes, Mapping):
        raise ValueError(f"mesh: {sizes!r} has no sizes by axis: write {{'dp': 2, 'tp': 4}}, or give a Mesh")
    known = set(DENSE_AXES) | set(EXPERT_AXES)
    unknown = sorted(set(sizes) - known)
    if unknown:
        raise ValueError(f"mesh: unknown axes {', '.join(unknown)}; axes are tp (tensor), dp (data), pp, cp, ep, edp")
    for axis, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"mesh: {axis} must be a positive integer, got {size!r}")
    pp, dp, cp, tp = (sizes.get(axis, 1) for axis in DENSE_AXES)
    ep = sizes.get("ep", 1)
    if "dp" not in sizes and "edp" in sizes:
        dp = sizes["edp"] * ep // cp
    mesh = Mesh(pp * dp * cp * tp, tp=tp, pp=pp, cp=cp, ep=ep)
    if sizes.get("edp", mesh.edp) != mesh.edp:
        raise ValueError(f"mesh: edp {sizes['edp']} does not fit dp {dp} x cp {cp} = edp x ep {ep}")
    return mesh


@lru_cache(maxsize=64)
def mesh_atoms(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Returns the atoms of every axis name of a mesh, outermost first, without those of one rank.

    Raises:
        ValueError: neither of cp and ep divides the other, so that they have no common pieces.
    """
    if (named := getattr(mesh, "named_atoms", None)) is not None:  # a mesh of the user's axes: named_mesh.py
        return named
    dp, cp, ep = mesh.dp, mesh.cp, mesh.ep
    sizes = {"pp": mesh.pp, "dp": dp, "cp": cp, "ep": ep, "edp": mesh.edp, "tp": mesh.tp}
    if ep == 1:
        table = {"dp": ("dp",), "cp": ("cp",), "ep": (), "edp": ("dp", "cp")}
    elif cp == 1:
        table = {"dp": ("edp", "ep"), "cp": (), "ep": ("ep",), "edp": ("edp",)}
    elif cp % ep == 0:
        table = {"dp": ("dp",), "cp": ("cp/ep", "ep"), "ep": ("ep",), "edp": ("dp", "cp/ep")}
        sizes["cp/ep"] = cp // ep
    elif ep % cp == 0:
        table = {"dp": ("edp", "ep/cp"), "cp": ("cp",), "ep": ("ep/cp", "cp"), "edp": ("edp",)}
        sizes["ep/cp"] = ep // cp
    else:
        raise ValueError(f"cannot check types with cp={cp} and ep={ep}: one must divide the other")
    parts = mesh.tp_parts
    sizes.update((name, part_of(name).length(mesh.tp)) for name in parts)
    table.update(pp=("pp",), **runs_of_parts(parts))
    return {axis: tuple(atom for atom in atoms if sizes[atom] > 1) for axis, atoms in table.items()}


def runs_of_parts(parts: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Returns the adjacent parts of tp that make up larger parts, and tp, by the names of these."""
    strides = [part_of(name).stride for name in parts]
    return {
        name_of_part("tp", strides[last], strides[first - 1] // strides[last] if first else None): parts[
            first : last + 1
        ]
        for first in range(len(parts))
        for last in range(first, len(parts))
    }


def atoms_of(axis: AxisLike, mesh: Mesh | None) -> tuple[str, ...]:
    """Returns the atoms of an axis: a name, a tuple of names, a ProcessGroup or a Communicator.

    Without a mesh a name is its own atom. A group that is no axis of the mesh is a separate atom.
    """
    if isinstance(axis, str):
        if mesh is None:
            return (axis,)
        if axis == "world":
            return atoms_of(tuple(mesh.sizes("world")), mesh)
        table = mesh_atoms(mesh)
        if axis in table:
            return table[axis]
        if any(axis in atoms for atoms in table.values()):
            return (axis,)
        mesh.size(axis)  # raises, with the names there are
        raise PartOfAxisError(axis, mesh)
    if isinstance(axis, tuple):
        return tuple(dict.fromkeys(atom for name in axis for atom in atoms_of(name, mesh)))
    communicator = context.communicator(axis)
    if communicator.size == 1:
        return ()
    return _of_ranks(communicator.axis, tuple(concrete(rank) for rank in communicator.ranks), mesh)


@lru_cache(maxsize=1024)
def _of_ranks(label: str, ranks: tuple[int, ...], mesh: Mesh | None) -> tuple[str, ...]:
    if mesh is not None:
        axis = mesh.axis_of(ranks)
        if axis is not None:
            return atoms_of(axis, mesh)
        if all(mesh.coordinate(("dp", "cp", "tp"), r) == mesh.coordinate(("dp", "cp", "tp"), ranks[0]) for r in ranks):
            return ("pp",)  # a part of the stages: those that hold a tied weight
        if not part_of(label).is_whole:
            return atoms_of(label, mesh)
    return (label if mesh is None and "," not in label else f"{label}{list(ranks)}",)

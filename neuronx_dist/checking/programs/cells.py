"""Cells: ranks that no table distinguishes, as products of sets of coordinates; a check plays one rank of each.

Every axis of a mesh, of the dense view and of the expert view, is a product of the mesh's atoms (spmd/axes.py): the
grid of the ranks is one over the atoms. Along each atom the coordinates fall into classes: those of one class are
interchangeable in every table that the cells were cut by. A cell is a product of one class per atom, and its
representative has the first coordinate of each. A table has one entry for all ranks of a cell.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from copy import copy
from itertools import product

from ...comm.ranks.rank_tables import RankTable
from ...mesh import Axis, Mesh, part_of
from ...spmd.axes import mesh_atoms

__all__ = ["Cells"]


class Cells:
    """The cells of a mesh; at first one for each stage of a pipeline."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        try:
            self._atoms_of = mesh_atoms(mesh)
            common = True
        except ValueError:  # cp and ep have no common pieces: one atom for dp and cp, of which nothing is put together
            data = dict.fromkeys(("dp", "cp", "edp", "ep"), ("dp,cp",))
            self._atoms_of = {**data, "pp": ("pp",), "tp": ("tp",)}
            common = False
        ordered = dict.fromkeys(atom for axis in ("pp", "edp", "ep", "tp") for atom in self._atoms_of[axis])
        self._sizes = {atom: _size(mesh, atom) for atom in ordered}
        self._classes = {atom: [0] * size for atom, size in self._sizes.items()}  # of each coordinate
        self.separate(["pp"] if common else ["pp", "dp,cp"])

    def copy(self) -> Cells:
        other = copy(self)
        other._classes = dict(self._classes)
        return other

    # --- cutting

    def cut(self, table: RankTable) -> None:
        """Separates ranks for which the table has different entries."""
        for name in table.names:
            atoms = self._atoms_of[name]
            if atoms == ("dp,cp",):
                continue  # all apart already
            labels = table.slices(name)
            inner = len(labels)
            for atom in atoms:
                size = self._sizes[atom]
                inner //= size
                step = inner * size
                starts = [start + k for start in range(0, len(labels), step) for k in range(inner)]
                self._cut(atom, [tuple(labels[start + i * inner] for start in starts) for i in range(size)])

    def separate(self, atoms: Iterable[str]) -> None:
        """Separates all coordinates on these atoms."""
        for atom in atoms:
            if atom in self._sizes:
                self._cut(atom, range(self._sizes[atom]))

    def isolate(self, rank: int) -> None:
        """Separates one rank from all others."""
        for atom, coordinate in self._at(rank).items():
            self._cut(atom, [other == coordinate for other in range(self._sizes[atom])])

    def _cut(self, atom: str, labels: Sequence[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        self._classes[atom] = [numbers.setdefault(label, len(numbers)) for label in zip(self._classes[atom], labels)]

    # --- what there is

    @property
    def atoms(self) -> list[str]:
        return [*self._sizes]

    def is_of_atoms(self, axis: Axis) -> bool:
        """Returns whether an axis is a product of atoms; a part of an axis need not be."""
        return all(name in self._atoms_of for name in self.mesh.groups(axis).names)

    def atoms_of(self, axis: Axis) -> list[str]:
        """The atoms of an axis; the atoms of the full axis for a part that is no product of atoms."""
        names = self.mesh.groups(axis).names
        return [atom for name in names for atom in self._atoms_of.get(name) or self._atoms_of[part_of(name).axis]]

    def atoms_between(self, one: int, other: int) -> list[str]:
        """The atoms along which two ranks differ."""
        here, there = self._at(one), self._at(other)
        return [atom for atom in self._sizes if here[atom] != there[atom]]

    def representative(self, rank: int) -> int:
        """The rank that stands for `rank`."""
        at = self._at(rank)
        return self._rank(self._classes[atom].index(self._classes[atom][at[atom]]) for atom in self._sizes)

    def representatives(self, stage: int | None = None) -> list[int]:
        """One rank for each cell of a stage, or of all stages, in the order of the grid."""
        firsts = [
            [stage] if atom == "pp" and stage is not None else [classes.index(k) for k in range(max(classes) + 1)]
            for atom, classes in self._classes.items()
        ]
        return [self._rank(at) for at in product(*firsts)]

    def count(self, rank: int) -> int:
        """Number of ranks in the cell of `rank`."""
        at = self._at(rank)
        return math.prod(classes.count(classes[at[atom]]) for atom, classes in self._classes.items())

    def backwards(self, ranks: Iterable[int]) -> Iterator[int]:
        """The ranks in the cells of `ranks`, from the end of the grid on."""
        for place in heapq.merge(*map(self._places_backwards, ranks), reverse=True):
            yield self.mesh.rank_at_place(place)

    def _places_backwards(self, rank: int) -> Iterator[int]:
        at = self._at(rank)
        same = [
            [i for i in reversed(range(len(classes))) if classes[i] == classes[at[atom]]]
            for atom, classes in self._classes.items()
        ]
        return map(self._place, product(*same))

    def _at(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank on the atoms."""
        place, at = self.mesh.place(rank), {}
        for atom, size in reversed(self._sizes.items()):
            place, at[atom] = divmod(place, size)
        return at

    def _place(self, at: Iterable[int]) -> int:
        index = 0
        for size, coordinate in zip(self._sizes.values(), at):
            index = index * size + coordinate
        return index

    def _rank(self, at: Iterable[int]) -> int:
        return self.mesh.rank_at_place(self._place(at))


def _size(mesh: Mesh, atom: str) -> int:
    if not part_of(atom).is_whole:
        return mesh.size(atom)
    outer, _, divisor = atom.partition("/")  # of "cp/ep": what is left of cp when ep is taken out of it
    return mesh.size(tuple(outer.split(","))) // (mesh.size(divisor) if divisor else 1)

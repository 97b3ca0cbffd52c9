"""Random numbers that ranks of a stage draw from different seeds, though their types say that they are equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from ...mesh import DENSE_AXES, Mesh
from ...spmd.axes import mesh_atoms
from .calls import Draw, Op

__all__ = ["axes_between", "differing_seeds"]


def axes_between(mesh: Mesh, one: int, other: int) -> list[str]:
    """Atoms of the axes in whose coordinates two ranks of a stage differ."""
    table, here, there = mesh_atoms(mesh), mesh.coordinates(one), mesh.coordinates(other)
    return [atom for axis in DENSE_AXES if axis != "pp" and here[axis] != there[axis] for atom in table[axis]]


def differing_seeds(mesh: Mesh, programs: Iterable[tuple[int, Sequence[Op]]]) -> dict[tuple[str, int], frozenset[str]]:
    """Plain seeds, by the line of the draw, that differ along axes along which the numbers were assumed equal.

    Args:
        programs: the rank and the operators of each program.
    """
    first: dict[int, tuple[int, Mapping[str, list[Draw]]]] = {}
    pairs = []
    for rank, ops in programs:
        drawn = rank, _draws(ops)
        one = first.setdefault(mesh.coordinate("pp", rank), drawn)
        pairs.append((axes_between(mesh, one[0], rank), one[1], drawn[1]))
    differing: dict[tuple[str, int], frozenset[str]] = {}
    for axes, one_draws, other_draws in sorted(pairs, key=lambda pair: len(pair[0])):
        for where, draws in one_draws.items():
            for a, b in zip(draws, other_draws.get(where, ())):
                known = differing.get((where, a.seed), frozenset())
                if a.seed == b.seed or known.intersection(axes) or any(map(a.stream.differs, axes)):
                    continue
                for draw in (a, b):
                    key = where, draw.seed
                    differing[key] = differing.get(key, frozenset()).union(axes)
    return differing


def _draws(ops: Sequence[Op]) -> Mapping[str, list[Draw]]:
    draws = defaultdict(list)
    for op in ops:
        if op.draw is not None and isinstance(op.draw.seed, int):
            draws[op.draw.where].append(op.draw)
    return draws

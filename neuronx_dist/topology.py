"""Rank orders: the assignment of ranks to places of a mesh's grid. Pure Python, no torch.

The places of the grid are counted row-major, the last axis fastest. In the "linear" order rank r is at place r. Where
the links between the devices of a node favour another order, the order is a permutation of the ranks of a node, equal
on all nodes; groups, coordinates and neighbours follow from the grid, as always.

    trn1    tensor parallel size 4: ranks n/4 apart, in a node of n, are linked.
            n = 32: tp groups [0, 8, 16, 24], [1, 9, 17, 25], ...
    trn2    a node is a torus of four rows. Two rows that touch are a tp group, 0 with 3 and 1 with 2, so that the ranks
            of equal index in the two groups touch as well (or all rows in that order, where the node is one group).
            n = 64: tp groups [0..15, 48..63], [16..31, 32..47]; groups of the next axis [0, 16], ..., [48, 32], ...

`UNITS` is an order for any device: the ranks of one model replica, all its stages, are adjacent. Rank r is part
r % n of replica r // n, for replicas of n ranks. (nnScaler's order.)
    n = 4, pp = 2: replicas [0, 1, 2, 3], [4, 5, 6, 7]; stages [0, 1, 4, 5], [2, 3, 6, 7]

The first two are the orders of NeuronX Distributed for those devices. (On trn2 NxD takes the expert view from the
linear order, so that edp groups hold ranks of different tp index. Here both views use one order.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

__all__ = [
    "LINEAR",
    "TOPOLOGIES",
    "UNITS",
    "Topology",
    "fitting_node",
    "place_in_units",
    "place_of",
    "rank_at",
    "rank_in_units",
]

LINEAR = "linear"
UNITS = "units"


class Topology(NamedTuple):
    """A rank order by device; numbers of ranks are those of a node.

    Attributes:
        ranks_per_node: number of ranks of the usual instance (trn2: with two physical cores to a rank, lnc_size=2).
        order: maps the number of ranks to the rank at each place. Rank 0 is at place 0: the rank that writes the files
            of the job is also the first one of its groups.
        tp: maps the number of ranks to the tensor parallel sizes that the order supports.
    """

    ranks_per_node: int
    order: Callable[[int], list[int]]
    tp: Callable[[int], tuple[int, ...]]


def _strided(ranks: int) -> list[int]:
    stride = ranks // 4
    return [first + step * stride for first in range(stride) for step in range(4)]


def _rows(ranks: int) -> list[int]:
    row = ranks // 4
    return [number * row + column for number in (0, 3, 1, 2) for column in range(row)]


TOPOLOGIES: dict[str, Topology | None] = {
    LINEAR: None,
    UNITS: None,
    "trn1": Topology(32, _strided, lambda ranks: (4,)),
    "trn2": Topology(64, _rows, lambda ranks: (ranks // 2, ranks)),
}


def fitting_node(name: str, ranks_per_node: int | None, *, world_size: int, tp: int, ep: int) -> int | None:
    """Returns the ranks of a node, by default those of the usual instance; None where the order needs no number.

    Raises:
        ValueError: there is no such topology, or it does not support these sizes.
    """
    if name not in TOPOLOGIES:
        raise ValueError(f"mesh: unknown topology {name!r}; the topologies are {', '.join(TOPOLOGIES)}")
    topology = TOPOLOGIES[name]
    if topology is None:
        return None
    ranks = topology.ranks_per_node if ranks_per_node is None else ranks_per_node
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 4 or ranks % 4:
        raise ValueError(f"mesh: topology {name!r} needs a multiple of 4 ranks per node, got {ranks!r}")
    sizes = topology.tp(ranks)
    if world_size % ranks or tp not in sizes or ep != 1:
        raise ValueError(
            f"mesh: topology {name!r} is for whole nodes of {ranks} ranks, tp={' or '.join(map(str, sizes))} and ep=1; "
            f"got world size {world_size}, tp={tp}, ep={ep}; use {LINEAR!r}, other sizes, or set ranks_per_node"
        )
    return ranks


def rank_at(name: str, ranks_per_node: int, position: int) -> int:
    """Returns the rank at a place of the grid."""
    node, index = divmod(position, ranks_per_node)
    return node * ranks_per_node + _order(name, ranks_per_node)[0][index]


def place_of(name: str, ranks_per_node: int, rank: int) -> int:
    """Returns the place of a rank in the grid."""
    node, index = divmod(rank, ranks_per_node)
    return node * ranks_per_node + _order(name, ranks_per_node)[1][index]


def place_in_units(rank: int, *, world_size: int, dp: int, pp: int) -> int:
    """Returns the place of a rank in the grid, in the order `UNITS`."""
    return _swapped(rank, dp, pp, world_size // (dp * pp))


def rank_in_units(position: int, *, world_size: int, dp: int, pp: int) -> int:
    """Returns the rank at a place of the grid, in the order `UNITS`."""
    return _swapped(position, pp, dp, world_size // (dp * pp))


def _swapped(index: int, outer: int, middle: int, inner: int) -> int:
    """Maps an index into `[outer, middle, inner]` to the index of that element in `[middle, outer, inner]`."""
    rest, last = divmod(index, inner)
    first, second = divmod(rest, middle)
    return (second * outer + first) * inner + last


@lru_cache(maxsize=64)
def _order(name: str, ranks_per_node: int) -> tuple[list[int], list[int]]:
    """Returns the rank at each place of a node, and the place of each rank."""
    topology = TOPOLOGIES[name]
    assert topology is not None
    ranks = topology.order(ranks_per_node)
    return ranks, sorted(range(ranks_per_node), key=ranks.__getitem__)

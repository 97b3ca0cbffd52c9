"""A rank of a mesh that is played in place of others: its coordinates are RankValues, whose reads are reported."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from ...call_site import call_sites
from ...mesh import DENSE_AXES, Axis, Groups, Mesh, part_of
from ...topology import LINEAR
from .rank_numbers import concrete
from .rank_tables import RankTable
from .rank_values import ORDER, RankValue, applied, combine

__all__ = ["ObservedRank", "RankGroup", "Read"]

OnRead = Callable[[frozenset[str]], None]


class Read(NamedTuple):
    """A read of the rank by the program: the answer on this rank, the answers on all others, and the line."""

    answers: RankTable
    where: str  # file:line of the user's code
    inside: str  # file:line of the innermost frame outside comm/ and torch

    @property
    def axes(self) -> frozenset[str]:
        """Axes along which the answer differs."""
        return frozenset(self.answers.names)

    def answer(self, at: Mapping[str, int]) -> Any:
        """Returns the answer on the rank with the coordinates `at` (`Mesh.coordinates(rank)`)."""
        return self.answers.at(at)


class ObservedRank:
    """A rank of a mesh whose coordinates are reported when they are read.

    Attributes:
        reads: all different reads so far, in order.
        number: the rank's number, as a plain int.
        rank: the same number as a RankValue.
    """

    def __init__(self, mesh: Mesh, rank: int, on_read: OnRead) -> None:
        self.mesh = mesh
        self.number = concrete(rank)
        self.coordinates_here = mesh.coordinates(self.number)
        self.on_read = on_read
        self.reads: list[Read] = []
        self._known: set[RankTable] = set()
        self._coordinates = {axis: self.value(self._coordinate(axis)) for axis in dict.fromkeys(ORDER)}

    @cached_property
    def rank(self) -> int:
        rank = self.value(self._numbers(self.mesh.groups(DENSE_AXES), DENSE_AXES, 0))
        if isinstance(rank, RankValue):
            rank._is_rank = True
        return rank

    def value(self, table: RankTable) -> int:
        """Returns the RankValue with these values; a plain number if all values are equal."""
        value: int = table.at(self.coordinates_here)
        return RankValue(value, table, self) if table.names else value

    def table_by_rank(self, by_rank: Sequence[Any] | Mapping[int, Any]) -> RankTable:
        """Returns the table of a function of the rank's number."""
        sizes = [self.mesh.size(name) for name in DENSE_AXES]
        ranks = range(self.mesh.world_size)
        return RankTable.of_values(DENSE_AXES, sizes, tuple(by_rank[self.mesh.rank_at_place(place)] for place in ranks))

    def _coordinate(self, axis: str) -> RankTable:
        return RankTable.of_steps((axis,), 0, [range(self.mesh.size(axis))])

    def _numbers(self, groups: Groups, names: Sequence[str], offset: int) -> RankTable:
        """Returns, for every rank, the rank `offset` places behind the one that has the coordinates on `names` alone.

        Coordinates are those of the dense view.
        """
        mesh = self.mesh
        data = mesh.groups(("dp", "cp")) if {"ep", "edp"} & {*names} else None
        steps: dict[str, list[int]] = {}
        for name in names:
            part = part_of(name)
            along = [part.of(k) * groups.strides[name] for k in range(mesh.size(part.axis))]
            steps[part.axis] = [*map(sum, zip(along, steps.get(part.axis, [0] * len(along))))]
        if data is not None:
            table = RankTable.of_values(
                ("dp", "cp"),
                (mesh.dp, mesh.cp),
                tuple(
                    sum(steps[name][at] for name, at in zip(("edp", "ep"), divmod(index, mesh.ep)) if name in steps)
                    for index in range(mesh.dp * mesh.cp)
                ),
            )
            steps = {name: of_axis for name, of_axis in steps.items() if name not in ("edp", "ep")}
        dense = [name for name in DENSE_AXES if name in steps]
        places = RankTable.of_steps(dense, offset, [steps[name] for name in dense])
        if data is not None:
            sums = applied(operator.add, (places, table))
            assert sums is not None
            places = sums
        return places if mesh.topology == LINEAR else places.map(mesh.rank_at_place)

    def read(self, answers: RankTable) -> Any:
        """Returns this rank's answer; reports the read unless all ranks have the same answer."""
        if answers.names:
            if answers not in self._known:
                self._known.add(answers)
                self.reads.append(Read(answers, *call_sites()))
            self.on_read(frozenset(answers.names))
        return answers.at(self.coordinates_here)

    def same_program(self, rank: int) -> bool:
        """Returns whether `rank` would have received the same answers, and so have run the same program."""
        coordinates = self.mesh.coordinates(rank)
        return all(read.answer(coordinates) == read.answer(self.coordinates_here) for read in self.reads)

    # Called by `Mesh` where `rank` stands in place of a plain number.

    def coordinates(self) -> dict[str, int]:
        return dict(self._coordinates)

    def group(self, axis: Axis) -> RankGroup:
        """Returns the group of this rank along an axis."""
        groups, local_index = self.mesh.groups(axis), self.mesh.coordinate(axis, self.rank)
        if not groups.others or len(groups) == 1:
            return RankGroup(groups.of(self.number), self, local_index)
        members = (self.value(self._numbers(groups, groups.others, offset)) for offset in groups.offsets)
        return RankGroup(members, self, local_index)

    def group_in(self, groups: Sequence[Sequence[int]], local_index: int) -> RankGroup:
        """Returns the group, of `groups` of equal size, that holds this rank."""
        by_rank = {rank: group for group in groups for rank in group}
        size = len(by_rank[self.number])
        columns = (
            {rank: group[index] if index < len(group) else -1 for rank, group in by_rank.items()}
            for index in range(size)
        )
        return RankGroup((self.value(self.table_by_rank(column)) for column in columns), self, local_index)


class RankGroup(tuple[int, ...]):
    """Ranks of this rank's group, which depend on its coordinates along the other axes."""

    _observed: ObservedRank
    _local_index: int

    def __new__(cls, ranks: Iterable[int], observed: ObservedRank, local_index: int) -> RankGroup:
        group = super().__new__(cls, ranks)
        group._observed, group._local_index = observed, local_index
        return group

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, RankValue):
            return super().__getitem__(index)
        local_index = self._local_index
        if isinstance(local_index, RankValue) and index.table == local_index.table and index.observed is self._observed:
            return self._observed.rank
        indices = [*range(len(self)), *range(-len(self), 0)]
        return combine(lambda i, *ranks: ranks[i] if i in indices else _out_of_range(), index, *self)

    def index(self, value: Any, *bounds: Any) -> int:
        return self._local_index if value is self._observed.rank and not bounds else super().index(value, *bounds)

    def __contains__(self, value: Any) -> bool:
        return value is self._observed.rank or super().__contains__(value)

    def __deepcopy__(self, memo: Any) -> RankGroup:
        return self


def _out_of_range() -> int:
    raise IndexError("the index is not in the group on every rank")

"""An int that carries its value on every rank, for running a program once in place of many ranks.

A `RankValue` is, say, this rank's index along some axes, with the value that it has on every other rank beside it.
Arithmetic with ints and RankValues gives RankValues and says nothing. Whatever lets the program go its own way
(a comparison, `bool`, `int`, `float`, `hash`, `str`) is a *read*: it is reported, unless the answer is the same on all
ranks (`0 <= rank < size`, `rank == rank`). A read knows the answer on every rank, so that a tool can tell which ranks
would have run the same program: `rank > 0` separates two kinds of ranks, `int(rank)` all.

What is *not* seen, because C code takes an int's digits without asking:

* torch: `x - c`, `x.narrow(d, c, n)`, `x[c]`, `x[:c]`, `torch.tensor(c)`, `torch.full((n,), c)` take it as a number. A
  TorchFunctionMode sees the RankValue among the arguments (`rank_values_in`), and has to judge: a value or a position
  that differs by rank makes the result vary over `c.axes`; where it decides a shape it has to call `c.read()`.
* Python: `items[c]`, `items[:c]`, `range(c)`, `"%d" % c`, `math.gcd(c, n)`, and a float on the left (`0.5 * c`). To be
  sure of such a program, run it for a second rank of the same kind and compare.

`concrete(c)` is this rank's number, with nothing reported: for code that behaves alike whatever it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ..call_site import call_sites
from ..mesh import DENSE_AXES, EXPERT_AXES, Axis, Groups, Mesh
from .rank_tables import RankTable, apply

__all__ = ["ObservedRank", "RankGroup", "RankValue", "Read", "concrete", "is_member", "rank_values_in", "value_on"]

OnRead = Callable[[frozenset[str]], None]
_ORDER = (*DENSE_AXES, *(name for name in EXPERT_AXES if name not in DENSE_AXES))


class Read(NamedTuple):
    """The program looked at its rank: what it learned there, and what it would have learned on others; and where."""

    answers: RankTable
    where: str  # file:line of the user's code
    inside: str  # file:line of the innermost frame outside comm/ and torch

    @property
    def axes(self) -> frozenset[str]:
        """The axes along which the answer differs."""
        return frozenset(self.answers.names)

    def answer(self, at: Mapping[str, int]) -> Any:
        """What a rank with the coordinates `at` (`Mesh.coordinates(rank)`) would have learned."""
        return self.answers.at(at)


class ObservedRank:
    """A rank of a mesh whose coordinates are reported when they are read.

    Attributes:
        reads: all different reads so far, in order.
        number: the rank's number, as a plain int.
        rank: the same as a RankValue.
    """

    def __init__(self, mesh: Mesh, rank: int, on_read: OnRead) -> None:
        self.mesh = mesh
        self.number = concrete(rank)
        self.coordinates_here = mesh.coordinates(self.number)
        self.on_read = on_read
        self.reads: list[Read] = []
        self._known: set[RankTable] = set()
        self._coordinates = {axis: self.value(self._coordinate(axis)) for axis in dict.fromkeys(_ORDER)}

    @cached_property
    def rank(self) -> int:
        rank = self.value(self._numbers(self.mesh.groups(DENSE_AXES), DENSE_AXES, 0))
        if isinstance(rank, RankValue):
            rank._is_rank = True
        return rank

    def value(self, table: RankTable) -> int:
        """The RankValue with these values; a plain number if they are all the same."""
        value: int = table.at(self.coordinates_here)
        return RankValue(value, table, self) if table.names else value

    def table_by_rank(self, by_rank: Sequence[Any] | Mapping[int, Any]) -> RankTable:
        """What each rank has, given by its number."""
        sizes = [self.mesh.size(name) for name in DENSE_AXES]
        ranks = range(self.mesh.world_size)
        return RankTable.of_values(DENSE_AXES, sizes, tuple(by_rank[self.mesh.rank_at_place(place)] for place in ranks))

    def _coordinate(self, axis: str) -> RankTable:
        return RankTable.of_steps((axis,), 0, [range(self.mesh.size(axis))])

    def _numbers(self, groups: Groups, names: Sequence[str], offset: int) -> RankTable:
        """The rank `offset` places behind where the coordinates on `names` alone would be, on every rank.

        It is said in coordinates of the dense view.
        """
        mesh = self.mesh
        data = mesh.groups(("dp", "cp")) if {"ep", "edp"} & {*names} else None
        steps = {name: [k * groups.strides[name] for k in range(mesh.size(name))] for name in names}
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
            sums = _applied(operator.add, (places, table))
            assert sums is not None
            places = sums
        return places if mesh.ranks_per_node is None else places.map(mesh.rank_at_place)

    def read(self, answers: RankTable) -> Any:
        """This rank's answer; reported if it is not everyone's."""
        if answers.names:
            if answers not in self._known:
                self._known.add(answers)
                self.reads.append(Read(answers, *call_sites()))
            self.on_read(frozenset(answers.names))
        return answers.at(self.coordinates_here)

    def same_program(self, rank: int) -> bool:
        """Whether `rank`, running the same code, would have got the same answers, and so have done the same."""
        coordinates = self.mesh.coordinates(rank)
        return all(read.answer(coordinates) == read.answer(self.coordinates_here) for read in self.reads)

    # What `Mesh` asks for, given `rank` in place of a plain number.

    def coordinates(self) -> dict[str, int]:
        return dict(self._coordinates)

    def group(self, axis: Axis) -> RankGroup:
        """The group of this rank along an axis."""
        groups, own = self.mesh.groups(axis), self.mesh.coordinate(axis, self.rank)
        if not groups.others or len(groups) == 1:
            return RankGroup(groups.of(self.number), self, own)
        members = (self.value(self._numbers(groups, groups.others, offset)) for offset in groups.offsets)
        return RankGroup(members, self, own)

    def group_in(self, groups: Sequence[Sequence[int]], own: int) -> RankGroup:
        """The one of `groups`, which are of equal size, that holds this rank."""
        by_rank = {rank: group for group in groups for rank in group}
        size = len(by_rank[self.number])
        columns = (
            {rank: group[index] if index < len(group) else -1 for rank, group in by_rank.items()}
            for index in range(size)
        )
        return RankGroup((self.value(self.table_by_rank(column)) for column in columns), self, own)


class RankGroup(tuple[int, ...]):
    """The ranks of this rank's group; which they are depends on where it is along the other axes."""

    _observed: ObservedRank
    _own: int

    def __new__(cls, ranks: Iterable[int], observed: ObservedRank, own: int) -> RankGroup:
        group = super().__new__(cls, ranks)
        group._observed, group._own = observed, own
        return group

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, RankValue):
            return super().__getitem__(index)
        own = self._own
        if isinstance(own, RankValue) and index.table == own.table and index.observed is self._observed:
            return self._observed.rank
        indices = [*range(len(self)), *range(-len(self), 0)]
        return _combine(lambda i, *ranks: ranks[i] if i in indices else _out_of_range(), index, *self)

    def index(self, value: Any, *bounds: Any) -> int:
        return self._own if value is self._observed.rank and not bounds else super().index(value, *bounds)

    def __contains__(self, value: Any) -> bool:
        return value is self._observed.rank or super().__contains__(value)

    def __deepcopy__(self, memo: Any) -> RankGroup:
        return self


class RankValue(int):
    """An int of this rank that carries its value on every rank of the mesh. Made by an `ObservedRank`.

    Attributes:
        table: its values on all ranks.
        names: the axes along which it differs from rank to rank.
        observed: the rank that it belongs to, which its reads are reported to.
    """

    table: RankTable
    observed: ObservedRank
    _is_rank = False

    def __new__(cls, value: int, table: RankTable, observed: ObservedRank) -> RankValue:
        number = super().__new__(cls, value)
        number.table, number.observed = table, observed
        return number

    @property
    def names(self) -> tuple[str, ...]:
        return self.table.names

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.table.names)

    def value_on(self, rank: int) -> int:
        """Its value on another rank of the mesh."""
        value: int = self.table.at(self.observed.mesh.coordinates(rank))
        return value

    def read(self) -> int:
        """The plain number; reports that the program knows it."""
        return int(self.observed.read(self.table))

    def mesh_coordinates(self, mesh: Mesh) -> dict[str, int] | None:
        """What `Mesh.coordinates` gives for it: None if it is not a rank of `mesh`."""
        return self.observed.coordinates() if self._is_rank and mesh == self.observed.mesh else None

    def mesh_group(self, mesh: Mesh, axis: Axis) -> RankGroup | None:
        return self.observed.group(axis) if self._is_rank and mesh == self.observed.mesh else None

    # --- reads

    def __bool__(self) -> bool:
        return bool(self.observed.read(self.table.map(bool)))

    def __int__(self) -> int:
        return self.read()

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.read())

    def __hash__(self) -> int:
        return hash(self.read())

    def __str__(self) -> str:
        return str(self.read())

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return format(self.read(), spec)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (self.read(),)

    __reduce_ex__ = __reduce__  # type: ignore[assignment]

    def __copy__(self) -> RankValue:
        return self

    def __deepcopy__(self, memo: Any) -> RankValue:
        return self

    def bit_length(self) -> int:
        return self.read().bit_length()

    def to_bytes(self, *args: Any, **kwargs: Any) -> bytes:
        return self.read().to_bytes(*args, **kwargs)

    # --- the same number

    def __round__(self, *digits: Any) -> int:
        return self

    def __trunc__(self) -> int:
        return self

    __floor__ = __ceil__ = conjugate = __trunc__
    real = property(__trunc__)
    numerator = property(__trunc__)


def concrete(x: int) -> int:
    """This rank's number as a plain int, nothing reported: for code that takes the same way whatever it is."""
    return int.__pos__(x) if isinstance(x, RankValue) else x


def value_on(x: int, rank: int) -> int:
    """The number that `x` is on another rank: itself, unless it is a RankValue."""
    return x.value_on(rank) if isinstance(x, RankValue) else x


def is_member(rank: int, ranks: Sequence[int]) -> bool:
    """Whether `rank` is one of `ranks`, as one read."""
    if not isinstance(rank, RankValue):
        return rank in ranks
    members = set(ranks)
    return bool(rank.observed.read(rank.table.map(members.__contains__)))


def rank_values_in(x: Any) -> list[RankValue]:
    """All RankValues in nested tuples, lists, dicts and slices: a torch call's arguments, say."""
    if isinstance(x, RankValue):
        return [x]
    if isinstance(x, (tuple, list)):
        return [value for item in x for value in rank_values_in(item)]
    if isinstance(x, dict):
        return [value for item in x.values() for value in rank_values_in(item)]
    if isinstance(x, slice):
        return rank_values_in((x.start, x.stop, x.step))
    return []


def _applied(function: Callable[..., Any], operands: Sequence[Any]) -> RankTable | None:
    return apply(function, _ORDER, *operands)


def _tables(operands: Sequence[Any]) -> tuple[ObservedRank, list[Any]] | None:
    """The operands with the tables of RankValues in place of them; None if these are of several meshes."""
    observed = next(x for x in operands if isinstance(x, RankValue)).observed
    if any(isinstance(x, RankValue) and x.observed is not observed for x in operands):
        return None
    return observed, [x.table if isinstance(x, RankValue) else x for x in operands]


def _combine(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of RankValues and ints, on every rank."""
    common = _tables(operands)
    if common is not None:
        observed, tables = common
        try:
            table = _applied(function, tables)
        except (ArithmeticError, ValueError):  # on another rank, perhaps, and not here
            table = None
        if table is not None and (table.steps is not None or all(type(value) is int for value in table.values)):
            return observed.value(table)
    return function(*(x.read() if isinstance(x, RankValue) else x for x in operands))


def _out_of_range() -> int:
    raise IndexError("the index is not in the group on every rank")


def _arithmetic(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[..., Any]:
    def method(self: RankValue, other: Any, *modulo: Any) -> Any:
        if modulo:
            return pow(self.read(), other, *modulo)
        if isinstance(other, int):
            other = other if isinstance(other, RankValue) else int.__pos__(other)  # a plain one
            return _combine(function, other, self) if swapped else _combine(function, self, other)
        if not isinstance(other, torch.Tensor):  # a float, a list, an array: the program has the number then
            self.read()
        return NotImplemented

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def method(self: RankValue, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        common = _tables((self, other))
        answers = None if common is None else _applied(function, common[1])
        if common is None or answers is None:
            return function(self.read(), other.read() if isinstance(other, RankValue) else other)
        return common[0].read(answers)

    return method


def _unary(function: Callable[[int], int]) -> Callable[[RankValue], Any]:
    return lambda self: _combine(function, self)


def _quotient(self: RankValue, other: Any) -> Any:
    if isinstance(other, torch.Tensor):
        return NotImplemented
    return self.read() / (other.read() if isinstance(other, RankValue) else other)


_BINARY = ("add", "sub", "mul", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
_METHODS: dict[str, Callable[..., Any]] = {
    **{f"__{name.strip('_')}__": _arithmetic(getattr(operator, name), False) for name in _BINARY},
    **{f"__r{name.strip('_')}__": _arithmetic(getattr(operator, name), True) for name in _BINARY},
    **{f"__{name}__": _comparison(getattr(operator, name)) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{f"__{name}__": _unary(getattr(operator, name)) for name in ("neg", "pos", "abs", "invert")},
    "__divmod__": lambda self, other: (self // other, self % other),
    "__rdivmod__": lambda self, other: (other // self, other % self),
    "__truediv__": _quotient,
    "__rtruediv__": lambda self, other: NotImplemented if isinstance(other, torch.Tensor) else other / self.read(),
}
# Set one by one, and not written as methods: about thirty operators are four functions of `operator`, and Python looks
# special methods up on the class, so that `__getattr__` could not give them.
for _name, _method in _METHODS.items():
    setattr(RankValue, _name, _method)

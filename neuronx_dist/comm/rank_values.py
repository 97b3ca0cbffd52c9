"""Ranks that know where they come from, for running a program once in place of many ranks.

A `Coordinate` is this rank's index along some axes: an int, with the value that it has on every other rank beside it.
Arithmetic with ints and Coordinates gives Coordinates and says nothing. Whatever lets the program go its own way
(a comparison, `bool`, `int`, `float`, `hash`, `str`) is a *read*: it is reported, unless the answer is the same on all
ranks (`0 <= rank < size`, `rank == rank`). A read knows the answer on every rank, so that a tool can tell which ranks
would have run the same program: `rank > 0` separates two kinds of ranks, `int(rank)` all.

What is *not* seen, because C code takes an int's digits without asking:

* torch: `x - c`, `x.narrow(d, c, n)`, `x[c]`, `x[:c]`, `torch.tensor(c)`, `torch.full((n,), c)` take it as a number. A
  TorchFunctionMode sees the Coordinate among the arguments (`find`), and has to judge: a value or a position that
  differs by rank makes the result vary over `c.axes`; where it decides a shape it has to call `c.read()`.
* Python: `items[c]`, `items[:c]`, `range(c)`, `"%d" % c`, `math.gcd(c, n)`, and a float on the left (`0.5 * c`). To be
  sure of such a program, run it for a second rank of the same kind and compare.

`plain(c)` is the number, with nothing reported: for code that behaves alike whatever it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..call_site import call_sites
from ..mesh import DENSE_AXES, EXPERT_AXES, Axis, Mesh

__all__ = ["Coordinate", "Group", "Place", "Read", "elsewhere", "find", "member", "plain"]

OnRead = Callable[[frozenset[str]], None]
_ORDER = (*DENSE_AXES, *(name for name in EXPERT_AXES if name not in DENSE_AXES))
_LARGEST = 1 << 16  # values that a table may have; combinations of the dense and the expert view could be more


class Read(NamedTuple):
    """The program looked at its rank: along which axes, what it learned, and where."""

    names: tuple[str, ...]  # axes along which the answer differs
    answers: tuple[Any, ...]  # one for each combination of their coordinates, the last axis fastest
    where: str  # file:line of the user's code
    inside: str  # file:line of the innermost frame outside comm/ and torch
    sizes: tuple[int, ...]

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.names)

    def answer(self, at: Mapping[str, int]) -> Any:
        """What a rank with the coordinates `at` (`Mesh.coordinates(rank)`) would have learned."""
        index = 0
        for name, size in zip(self.names, self.sizes):
            index = index * size + at[name]
        return self.answers[index]


class Place:
    """A rank of a mesh whose coordinates are reported when they are read.

    Attributes:
        reads: all different reads so far, in order.
        rank: the rank's number, as a Coordinate.
    """

    def __init__(self, mesh: Mesh, rank: int, on_read: OnRead) -> None:
        self.mesh = mesh
        self.number = plain(rank)
        self.at = mesh.coordinates(self.number)
        self.on_read = on_read
        self.reads: list[Read] = []
        self._known: set[tuple[Any, ...]] = set()
        self._coordinates = {
            name: self.make((name,), tuple(range(getattr(mesh, name)))) for name in dict.fromkeys(_ORDER)
        }
        self.rank: int = self.along(range(mesh.world_size))
        if isinstance(self.rank, Coordinate):
            self.rank._is_rank = True

    def along(self, values: Sequence[int]) -> int:
        """A number that is `values[rank]` on each rank."""
        return self.make(DENSE_AXES, self.table_of(values))

    def table_of(self, by_rank: Sequence[Any] | Mapping[int, Any]) -> tuple[Any, ...]:
        """What each rank has, given by its number, as a table over the dense axes."""
        return tuple(by_rank[rank] for rank in self.mesh.groups(DENSE_AXES)[0])

    def make(self, names: Sequence[str], table: tuple[Any, ...]) -> int:
        """The Coordinate with these values along these axes; a plain number if they are all the same."""
        names, table = self.reduce(names, table)
        return Coordinate(table[self.index(names)], names, table, self) if names else table[0]

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [getattr(self.mesh, name) for name in names]

    def index(self, names: Sequence[str]) -> int:
        """Where this rank's entry is in a table over the axes `names`."""
        index = 0
        for name in names:
            index = index * getattr(self.mesh, name) + self.at[name]
        return index

    def reduce(self, names: Sequence[str], table: tuple[Any, ...]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """The table without the axes along which nothing changes."""
        kept = []
        inner = len(table)
        for name in names:
            size = getattr(self.mesh, name)
            block, inner = inner, inner // size
            starts = range(0, len(table), block)
            if all(
                table[start : start + inner] == table[start + k * inner : start + (k + 1) * inner]
                for start in starts
                for k in range(1, size)
            ):
                table = tuple(value for start in starts for value in table[start : start + inner])
            else:
                kept.append(name)
        return tuple(kept), table

    def widen(self, names: tuple[str, ...], table: tuple[Any, ...], to: Sequence[str]) -> tuple[Any, ...]:
        """The table over more axes, in the order `to`."""
        if names == to:
            return table
        steps, step = {}, 1
        for name in reversed(names):
            steps[name] = step
            step *= getattr(self.mesh, name)
        indices = [0]
        for name in to:
            step = steps.get(name, 0)
            indices = [index + k * step for index in indices for k in range(getattr(self.mesh, name))]
        return tuple(table[index] for index in indices)

    def read(self, names: tuple[str, ...], answers: tuple[Any, ...]) -> Any:
        """This rank's answer; reported if it is not everyone's."""
        names, answers = self.reduce(names, answers)
        if names:
            key = (names, answers)
            if key not in self._known:
                self._known.add(key)
                self.reads.append(Read(names, answers, *call_sites(), tuple(self.sizes(names))))
            self.on_read(frozenset(names))
        return answers[self.index(names)]

    def same_program(self, rank: int) -> bool:
        """Whether `rank`, running the same code, would have got the same answers, and so have done the same."""
        at = self.mesh.coordinates(rank)
        return all(read.answer(at) == read.answer(self.at) for read in self.reads)

    # What `Mesh` asks for, given `rank` in place of a plain number.

    def coordinates(self) -> dict[str, int]:
        return dict(self._coordinates)

    def group(self, axis: Axis) -> Group:
        return self.group_among(self.mesh.groups(axis), self.mesh.coordinate(axis, self.rank))

    def group_among(self, groups: Sequence[Sequence[int]], own: int) -> Group:
        """The one of `groups`, which are of equal size, that holds this rank."""
        if len(groups) == 1:
            return Group(groups[0], self, own)
        by_rank = {rank: group for group in groups for rank in group}
        all_ranks = range(self.mesh.world_size)
        size = len(by_rank[self.number])
        return Group((self.along([(*by_rank[r], *[-1] * size)[i] for r in all_ranks]) for i in range(size)), self, own)


class Group(tuple[int, ...]):
    """The ranks of this rank's group; which they are depends on where it is along the other axes."""

    _place: Place
    _own: int

    def __new__(cls, ranks: Iterable[int], place: Place, own: int) -> Group:
        made = super().__new__(cls, ranks)
        made._place, made._own = place, own
        return made

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, Coordinate):
            return super().__getitem__(index)
        places = [*range(len(self)), *range(-len(self), 0)]
        return _combine(lambda i, *ranks: ranks[i] if i in places else _out_of_range(), index, *self)

    def index(self, value: Any, *bounds: Any) -> int:
        return self._own if value is self._place.rank and not bounds else super().index(value, *bounds)

    def __contains__(self, value: Any) -> bool:
        return value is self._place.rank or super().__contains__(value)

    def __deepcopy__(self, memo: Any) -> Group:
        return self


class Coordinate(int):
    """An index along axes of the mesh, and what it is on the other ranks. Made by a `Place`.

    Attributes:
        axes: along which it differs from rank to rank.
    """

    names: tuple[str, ...]
    table: tuple[int, ...]
    place: Place
    _is_rank = False

    def __new__(cls, value: int, names: tuple[str, ...], table: tuple[int, ...], place: Place) -> Coordinate:
        made = super().__new__(cls, value)
        made.names, made.table, made.place = names, table, place
        return made

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.names)

    def read(self) -> int:
        """The plain number; reports that the program knows it."""
        return int(self.place.read(self.names, self.table))

    def mesh_coordinates(self, mesh: Mesh) -> dict[str, int] | None:
        """What `Mesh.coordinates` gives for it: None if it is not a rank of `mesh`."""
        return self.place.coordinates() if self._is_rank and mesh == self.place.mesh else None

    def mesh_group(self, mesh: Mesh, axis: Axis) -> Group | None:
        return self.place.group(axis) if self._is_rank and mesh == self.place.mesh else None

    # --- reads

    def __bool__(self) -> bool:
        return bool(self.place.read(self.names, tuple(value != 0 for value in self.table)))

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

    def __copy__(self) -> Coordinate:
        return self

    def __deepcopy__(self, memo: Any) -> Coordinate:
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


def plain(x: int) -> int:
    """The number itself, nothing reported. For code that takes the same way whatever it is."""
    return x.table[x.place.index(x.names)] if isinstance(x, Coordinate) else x


def elsewhere(x: int, rank: int) -> int:
    """The number that `x` is on another rank."""
    if not isinstance(x, Coordinate):
        return x
    at, index = x.place.mesh.coordinates(rank), 0
    for name in x.names:
        index = index * getattr(x.place.mesh, name) + at[name]
    return x.table[index]


def member(rank: int, ranks: Sequence[int]) -> bool:
    """Whether `rank` is one of `ranks`, as one read."""
    if not isinstance(rank, Coordinate):
        return rank in ranks
    among = set(ranks)
    return bool(rank.place.read(rank.names, tuple(value in among for value in rank.table)))


def find(x: Any) -> list[Coordinate]:
    """All Coordinates in nested tuples, lists, dicts and slices: a torch call's arguments, say."""
    if isinstance(x, Coordinate):
        return [x]
    if isinstance(x, (tuple, list)):
        return [found for item in x for found in find(item)]
    if isinstance(x, dict):
        return [found for item in x.values() for found in find(item)]
    if isinstance(x, slice):
        return find((x.start, x.stop, x.step))
    return []


def _columns(operands: Sequence[Any]) -> tuple[Place, tuple[str, ...], list[tuple[Any, ...]]] | None:
    """The operands' values on every rank; None if that is not one mesh, or too many."""
    coordinates = [x for x in operands if isinstance(x, Coordinate)]
    place, names = coordinates[0].place, coordinates[0].names
    if len(coordinates) > 1:
        used = {name for x in coordinates for name in x.names}
        names = tuple(name for name in _ORDER if name in used)
    count = math.prod(place.sizes(names))
    if count > _LARGEST or any(x.place is not place for x in coordinates):
        return None
    columns = [place.widen(x.names, x.table, names) if isinstance(x, Coordinate) else (x,) * count for x in operands]
    return place, names, columns


def _combine(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of Coordinates and ints, on every rank."""
    found = _columns(operands)
    if found is not None:
        place, names, columns = found
        try:
            table = tuple(map(function, *columns))
        except (ArithmeticError, ValueError):  # on another rank, perhaps, and not here
            table = ()
        if table and all(type(value) is int for value in table):
            return place.make(names, table)
    return function(*(x.read() if isinstance(x, Coordinate) else x for x in operands))


def _out_of_range() -> int:
    raise IndexError("the index is not in the group on every rank")


def _arithmetic(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[..., Any]:
    def method(self: Coordinate, other: Any, *modulo: Any) -> Any:
        if modulo:
            return pow(self.read(), other, *modulo)
        if isinstance(other, int):
            return _combine(function, other, self) if swapped else _combine(function, self, other)
        if not isinstance(other, torch.Tensor):  # a float, a list, an array: the program has the number then
            self.read()
        return NotImplemented

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def method(self: Coordinate, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        found = _columns((self, other))
        if found is None:
            return function(self.read(), other.read() if isinstance(other, Coordinate) else other)
        place, names, columns = found
        return place.read(names, tuple(map(function, *columns)))

    return method


def _unary(function: Callable[[int], int]) -> Callable[[Coordinate], Any]:
    return lambda self: _combine(function, self)


def _quotient(self: Coordinate, other: Any) -> Any:
    if isinstance(other, torch.Tensor):
        return NotImplemented
    return self.read() / (other.read() if isinstance(other, Coordinate) else other)


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
for _name, _method in _METHODS.items():
    setattr(Coordinate, _name, _method)

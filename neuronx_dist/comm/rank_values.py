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

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..call_site import call_sites
from ..mesh import DENSE_AXES, EXPERT_AXES, Axis, Mesh

__all__ = ["ObservedRank", "RankGroup", "RankValue", "Read", "concrete", "is_member", "rank_values_in", "value_on"]

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
        self._known: set[tuple[Any, ...]] = set()
        self._coordinates = {
            axis: self.value_along((axis,), tuple(range(getattr(mesh, axis)))) for axis in dict.fromkeys(_ORDER)
        }
        self.rank: int = self.value_by_rank(range(mesh.world_size))
        if isinstance(self.rank, RankValue):
            self.rank._is_rank = True

    def value_by_rank(self, values: Sequence[int]) -> int:
        """A number that is `values[rank]` on each rank."""
        return self.value_along(DENSE_AXES, self.table_by_rank(values))

    def table_by_rank(self, by_rank: Sequence[Any] | Mapping[int, Any]) -> tuple[Any, ...]:
        """What each rank has, given by its number, as a table over the dense axes."""
        return tuple(by_rank[rank] for rank in self.mesh.groups(DENSE_AXES)[0])

    def value_along(self, names: Sequence[str], table: tuple[Any, ...]) -> int:
        """The RankValue with these values along these axes; a plain number if they are all the same."""
        names, table = self.without_constant_axes(names, table)
        return RankValue(table[self.index(names)], names, table, self) if names else table[0]

    def sizes(self, names: Sequence[str]) -> list[int]:
        return [getattr(self.mesh, name) for name in names]

    def index(self, names: Sequence[str]) -> int:
        """Where this rank's entry is in a table over the axes `names`."""
        index = 0
        for name in names:
            index = index * getattr(self.mesh, name) + self.coordinates_here[name]
        return index

    def without_constant_axes(
        self, names: Sequence[str], table: tuple[Any, ...]
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        """Drops the axes along which a table is the same; returns the axes that are left, and its values on them."""
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

    def expanded(self, names: tuple[str, ...], table: tuple[Any, ...], to: Sequence[str]) -> tuple[Any, ...]:
        """The table over more axes, in the order of `to`: the same along those that are new."""
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
        names, answers = self.without_constant_axes(names, answers)
        if names:
            key = (names, answers)
            if key not in self._known:
                self._known.add(key)
                self.reads.append(Read(names, answers, *call_sites(), tuple(self.sizes(names))))
            self.on_read(frozenset(names))
        return answers[self.index(names)]

    def same_program(self, rank: int) -> bool:
        """Whether `rank`, running the same code, would have got the same answers, and so have done the same."""
        coordinates = self.mesh.coordinates(rank)
        return all(read.answer(coordinates) == read.answer(self.coordinates_here) for read in self.reads)

    # What `Mesh` asks for, given `rank` in place of a plain number.

    def coordinates(self) -> dict[str, int]:
        return dict(self._coordinates)

    def group(self, axis: Axis) -> RankGroup:
        return self.group_in(self.mesh.groups(axis), self.mesh.coordinate(axis, self.rank))

    def group_in(self, groups: Sequence[Sequence[int]], own: int) -> RankGroup:
        """The one of `groups`, which are of equal size, that holds this rank."""
        if len(groups) == 1:
            return RankGroup(groups[0], self, own)
        by_rank = {rank: group for group in groups for rank in group}
        all_ranks = range(self.mesh.world_size)
        size = len(by_rank[self.number])
        members = (self.value_by_rank([(*by_rank[r], *[-1] * size)[i] for r in all_ranks]) for i in range(size))
        return RankGroup(members, self, own)


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
        names: the axes along which it differs from rank to rank.
        table: its values, one for each combination of the coordinates on `names`, the last axis fastest.
        observed: the rank that it belongs to, which its reads are reported to.
    """

    names: tuple[str, ...]
    table: tuple[int, ...]
    observed: ObservedRank
    _is_rank = False

    def __new__(cls, value: int, names: tuple[str, ...], table: tuple[int, ...], observed: ObservedRank) -> RankValue:
        number = super().__new__(cls, value)
        number.names, number.table, number.observed = names, table, observed
        return number

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(self.names)

    def value_on(self, rank: int) -> int:
        """Its value on another rank of the mesh."""
        mesh = self.observed.mesh
        coordinates, index = mesh.coordinates(rank), 0
        for name in self.names:
            index = index * getattr(mesh, name) + coordinates[name]
        return self.table[index]

    def read(self) -> int:
        """The plain number; reports that the program knows it."""
        return int(self.observed.read(self.names, self.table))

    def mesh_coordinates(self, mesh: Mesh) -> dict[str, int] | None:
        """What `Mesh.coordinates` gives for it: None if it is not a rank of `mesh`."""
        return self.observed.coordinates() if self._is_rank and mesh == self.observed.mesh else None

    def mesh_group(self, mesh: Mesh, axis: Axis) -> RankGroup | None:
        return self.observed.group(axis) if self._is_rank and mesh == self.observed.mesh else None

    # --- reads

    def __bool__(self) -> bool:
        return bool(self.observed.read(self.names, tuple(value != 0 for value in self.table)))

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
    return x.table[x.observed.index(x.names)] if isinstance(x, RankValue) else x


def value_on(x: int, rank: int) -> int:
    """The number that `x` is on another rank: itself, unless it is a RankValue."""
    return x.value_on(rank) if isinstance(x, RankValue) else x


def is_member(rank: int, ranks: Sequence[int]) -> bool:
    """Whether `rank` is one of `ranks`, as one read."""
    if not isinstance(rank, RankValue):
        return rank in ranks
    members = set(ranks)
    return bool(rank.observed.read(rank.names, tuple(value in members for value in rank.table)))


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


def _columns(operands: Sequence[Any]) -> tuple[ObservedRank, tuple[str, ...], list[tuple[Any, ...]]] | None:
    """The operands' values on every rank; None if that is not one mesh, or too many."""
    values = [x for x in operands if isinstance(x, RankValue)]
    observed, names = values[0].observed, values[0].names
    if len(values) > 1:
        used = {name for x in values for name in x.names}
        names = tuple(name for name in _ORDER if name in used)
    count = math.prod(observed.sizes(names))
    if count > _LARGEST or any(x.observed is not observed for x in values):
        return None
    columns = [
        observed.expanded(x.names, x.table, names) if isinstance(x, RankValue) else (x,) * count for x in operands
    ]
    return observed, names, columns


def _combine(function: Callable[..., Any], *operands: Any) -> Any:
    """`function` of RankValues and ints, on every rank."""
    common = _columns(operands)
    if common is not None:
        observed, names, columns = common
        try:
            table = tuple(map(function, *columns))
        except (ArithmeticError, ValueError):  # on another rank, perhaps, and not here
            table = ()
        if table and all(type(value) is int for value in table):
            return observed.value_along(names, table)
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
        common = _columns((self, other))
        if common is None:
            return function(self.read(), other.read() if isinstance(other, RankValue) else other)
        observed, names, columns = common
        return observed.read(names, tuple(map(function, *columns)))

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

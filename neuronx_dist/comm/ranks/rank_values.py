"""An int that carries its value on every rank, for running a program once in place of many ranks.

A `RankValue` is for example this rank's index along some axes, together with its value on every other rank.
Arithmetic with ints and RankValues returns RankValues and reports nothing. An operation by which the program could
branch (a comparison, `bool`, `int`, `float`, `hash`, `str`) is a *read*: it is reported, unless the answer is the same
on all ranks (`0 <= rank < size`, `rank == rank`). A read knows the answer on every rank, so that a tool can tell which
ranks would have run the same program: `rank > 0` separates two kinds of ranks, `int(rank)` all.

Reads that are *not* seen, because C code takes an int's digits directly:

* torch: `x - c`, `x.narrow(d, c, n)`, `x[c]`, `x[:c]`, `torch.tensor(c)`, `torch.full((n,), c)` take it as a number. A
  TorchFunctionMode sees the RankValue among the arguments (`rank_values_in`), and has to judge: a value or a position
  that differs by rank makes the result vary over `c.axes`; where it decides a shape it has to call `c.read()`.
* Python: `items[c]`, `items[:c]`, `range(c)`, `"%d" % c`, `math.gcd(c, n)`, and a float on the left (`0.5 * c`). To be
  sure of such a program, run it for a second rank of the same kind and compare.

`rank_numbers.concrete(c)` is this rank's number, without a report: for code that behaves equally for all numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ...mesh import DENSE_AXES, EXPERT_AXES, Axis, Mesh, part_of
from .rank_numbers import RankNumber
from .rank_tables import RankTable, apply

__all__ = [
    "ORDER",
    "Observed",
    "RankValue",
    "applied",
    "combine",
    "rank_values_in",
    "value_on",
]

ORDER = (*DENSE_AXES, *(name for name in EXPERT_AXES if name not in DENSE_AXES))


class Observed(Protocol):
    """The rank that RankValues belong to (`observed_ranks.ObservedRank`)."""

    mesh: Mesh

    def value(self, table: RankTable) -> int:
        """Returns the RankValue with these values; a plain number if all values are equal."""

    def read(self, answers: RankTable) -> Any:
        """Returns this rank's answer; reports the read unless all ranks have the same answer."""

    def coordinates(self) -> dict[str, int]:
        """Coordinates on every axis of both views."""

    def group(self, axis: Axis) -> tuple[int, ...]:
        """Returns the group of this rank along an axis."""


class RankValue(RankNumber):
    """An int of this rank that carries its value on every rank of the mesh. Made by an `ObservedRank`.

    Attributes:
        table: its values on all ranks.
        names: the axes along which it differs from rank to rank.
        observed: the rank that it belongs to, which its reads are reported to.
    """

    table: RankTable
    observed: Observed
    _is_rank = False

    def __new__(cls, value: int, table: RankTable, observed: Observed) -> RankValue:
        number = super().__new__(cls, value)
        number.table, number.observed = table, observed
        return number

    @property
    def names(self) -> tuple[str, ...]:
        return self.table.names

    @property
    def axes(self) -> frozenset[str]:
        """Axes along which the value differs; where types are written on parts of tp, the parts."""
        parts = self.observed.mesh.tp_parts
        if len(parts) == 1 or "tp" not in self.names or self.table.steps is None:
            return frozenset(self.names)
        steps = self.table.steps[self.names.index("tp")]
        differing = {
            name
            for name, part in zip(parts, map(part_of, parts))
            if any(step != steps[k - part.of(k) * part.stride] for k, step in enumerate(steps))
        }
        return frozenset({*self.names, *differing} - {"tp"})

    def value_on(self, rank: int) -> int:
        """Returns the value on another rank of the mesh."""
        value: int = self.table.at(self.observed.mesh.coordinates(rank))
        return value

    def read(self) -> int:
        """Returns the plain number, and reports that the program knows the value."""
        return int(self.observed.read(self.table))

    def is_in(self, ranks: Sequence[int]) -> bool:
        members = set(ranks)
        return bool(self.observed.read(self.table.map(members.__contains__)))

    def mesh_coordinates(self, mesh: Mesh) -> dict[str, int] | None:
        """Returns the result of `Mesh.coordinates` for this rank; None if the value is no rank of `mesh`."""
        return self.observed.coordinates() if self._is_rank and mesh == self.observed.mesh else None

    def mesh_group(self, mesh: Mesh, axis: Axis) -> tuple[int, ...] | None:
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

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return int, (self.read(),)

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


def value_on(x: int, rank: int) -> int:
    """Returns the value of `x` on another rank: `x` itself, unless it is a RankValue."""
    return x.value_on(rank) if isinstance(x, RankValue) else x


def rank_values_in(x: Any) -> list[RankValue]:
    """Returns all RankValues in nested tuples, lists, dicts and slices, such as a torch call's arguments."""
    if isinstance(x, RankValue):
        return [x]
    if isinstance(x, (tuple, list)):
        return [value for item in x for value in rank_values_in(item)]
    if isinstance(x, dict):
        return [value for item in x.values() for value in rank_values_in(item)]
    if isinstance(x, slice):
        return rank_values_in((x.start, x.stop, x.step))
    return []


def applied(function: Callable[..., Any], operands: Sequence[Any]) -> RankTable | None:
    """Applies `function` to tables and numbers on every rank; returns None where the list would be too long."""
    return apply(function, ORDER, *operands)


def _tables(operands: Sequence[Any]) -> tuple[Observed, list[Any]] | None:
    """Replaces RankValues by their tables; returns None if they belong to several meshes."""
    observed = next(x for x in operands if isinstance(x, RankValue)).observed
    if any(isinstance(x, RankValue) and x.observed is not observed for x in operands):
        return None
    return observed, [x.table if isinstance(x, RankValue) else x for x in operands]


def combine(function: Callable[..., Any], *operands: Any) -> Any:
    """Applies `function` to RankValues and ints on every rank."""
    common = _tables(operands)
    if common is not None:
        observed, tables = common
        try:
            table = applied(function, tables)
        except (ArithmeticError, ValueError):  # on another rank, perhaps, and not here
            table = None
        if table is not None and (table.steps is not None or all(type(value) is int for value in table.values)):
            return observed.value(table)
    return function(*(x.read() if isinstance(x, RankValue) else x for x in operands))


def _arithmetic(function: Callable[[Any, Any], Any], swapped: bool) -> Callable[..., Any]:
    def method(self: RankValue, other: Any, *modulo: Any) -> Any:
        if modulo:
            return pow(self.read(), other, *modulo)
        if isinstance(other, int):
            other = other if isinstance(other, RankValue) else int.__pos__(other)  # a plain int
            return combine(function, other, self) if swapped else combine(function, self, other)
        if not isinstance(other, torch.Tensor):  # a float, a list, an array: the program has the number then
            self.read()
        return NotImplemented

    return method


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    def method(self: RankValue, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        common = _tables((self, other))
        answers = None if common is None else applied(function, common[1])
        if common is None or answers is None:
            return function(self.read(), other.read() if isinstance(other, RankValue) else other)
        return common[0].read(answers)

    return method


def _unary(function: Callable[[int], int]) -> Callable[[RankValue], Any]:
    return lambda self: combine(function, self)


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
# Set in a loop, not written as methods: about thirty operators are four functions of `operator`, and Python looks
# special methods up on the class, so that `__getattr__` could not provide them.
for _name, _method in _METHODS.items():
    setattr(RankValue, _name, _method)

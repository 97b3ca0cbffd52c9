"""Values that differ from rank to rank, as a table over axes of a mesh, small however many ranks there are.

A rank's number is `8192 * pp + 4 * dp + tp`: a sum of one table per axis, of 16 + 2048 + 4 entries, and not a list of
131,072. Sums, differences and multiples of such tables are such tables again, and so are quotients and remainders by
which a coordinate is taken out of a number (`rank // 4 % 2048`). Other values (`rank == 5`) are listed, one entry for
each combination of coordinates.

A table has one form: it names only axes along which it differs, and numbers that are a sum are stored as a sum. So
tables with the same values compare equal.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

__all__ = ["LARGEST", "RankTable", "apply"]

LARGEST = 1 << 20  # longest list of entries


class RankTable:
    """Values by coordinates.

    Attributes:
        names: the axes along which the values differ, outermost first.
        sizes: the sizes of these axes.
        base: for a sum of tables, the value where all coordinates are 0.
        steps: for a sum, the amount that each coordinate of each axis adds to `base`; None: the values are no such sum.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        base: int = 0,
        steps: tuple[tuple[int, ...], ...] | None = None,
        values: tuple[Any, ...] | None = None,
    ) -> None:
        self.names, self.sizes, self.base, self.steps = names, sizes, base, steps
        if values is not None:
            self.__dict__["values"] = values
        self._key = (names, sizes, base, steps if steps is not None else values)
        self._hash = hash(self._key)

    @staticmethod
    def of_steps(names: Sequence[str], base: int, steps: Sequence[Sequence[int]]) -> RankTable:
        """Returns the table of `base` plus, for each axis, the step at the rank's coordinate."""
        base += sum(of_axis[0] for of_axis in steps)
        varying = [
            (name, tuple(step - of_axis[0] for step in of_axis))
            for name, of_axis in zip(names, steps)
            if any(step != of_axis[0] for step in of_axis)
        ]
        sizes = tuple(len(of_axis) for _, of_axis in varying)
        return RankTable(tuple(name for name, _ in varying), sizes, base, tuple(of_axis for _, of_axis in varying))

    @staticmethod
    def of_values(names: Sequence[str], sizes: Sequence[int], values: tuple[Any, ...]) -> RankTable:
        """Returns the table with these values, one for each combination of coordinates, the last axis fastest."""
        names, sizes, values = _without_constant_axes(names, sizes, values)
        if all(type(value) is int for value in values):
            strides = _strides(sizes)
            steps = [
                tuple(values[index * stride] - values[0] for index in range(size))
                for size, stride in zip(sizes, strides)
            ]
            if len(names) <= 1 or values == _sums(values[0], steps):
                return RankTable(names, sizes, values[0], tuple(steps), values)
        return RankTable(names, sizes, values=values)

    @cached_property
    def values(self) -> tuple[Any, ...]:
        """Returns the value at each combination of coordinates, the last axis fastest."""
        assert self.steps is not None
        return _sums(self.base, self.steps)

    @property
    def count(self) -> int:
        return math.prod(self.sizes)

    def at(self, coordinates: Mapping[str, int]) -> Any:
        """Returns the value of the rank with these coordinates (`Mesh.coordinates(rank)`)."""
        if self.steps is not None:
            return self.base + sum(of_axis[coordinates[name]] for name, of_axis in zip(self.names, self.steps))
        index = 0
        for name, size in zip(self.names, self.sizes):
            index = index * size + coordinates[name]
        return self.values[index]

    def map(self, function: Callable[[Any], Any]) -> RankTable:
        """Returns the table of `function(value)`."""
        return RankTable.of_values(self.names, self.sizes, tuple(map(function, self.values)))

    def slices(self, name: str) -> list[Hashable]:
        """Returns a hashable label per coordinate of an axis; coordinates with equal labels are interchangeable."""
        axis = self.names.index(name)
        if self.steps is not None:
            return [*self.steps[axis]]
        inner = math.prod(self.sizes[axis + 1 :])
        outer = range(0, self.count, inner * self.sizes[axis])
        return [
            tuple(self.values[start + index * inner : start + (index + 1) * inner] for start in outer)
            for index in range(self.sizes[axis])
        ]

    def over(self, names: Sequence[str], sizes: Sequence[int]) -> tuple[Any, ...]:
        """Returns the values at each combination of coordinates of more axes."""
        if tuple(names) == self.names:
            return self.values
        strides = dict(zip(self.names, _strides(self.sizes)))
        indices = [0]
        for name, size in zip(names, sizes):
            stride = strides.get(name, 0)
            indices = [index + k * stride for index in indices for k in range(size)]
        values = self.values
        return tuple(values[index] for index in indices)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RankTable) and self._hash == other._hash and self._key == other._key)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        shown = self.values if self.count <= 8 else [*(self.values[:4] if self.steps is None else ()), "..."]
        return f"[{', '.join(map(str, shown))}] along {', '.join(self.names) or 'no axis'}"


def apply(function: Callable[..., Any], order: tuple[str, ...], *operands: Any) -> RankTable | None:
    """Applies `function` to tables and numbers on every rank; returns None where the list would be too long.

    Args:
        order: names of axes, outermost first, for values that depend on several axes.

    Raises:
        ArithmeticError, ValueError, LookupError: `function` raised it on some rank.
    """
    return (_apply_known if function in _KNOWN else _apply)(function, order, *operands)


def _apply(function: Callable[..., Any], order: tuple[str, ...], *operands: Any) -> RankTable | None:
    exact = _SUMS.get(function)
    if exact is not None:
        table = exact(order, *operands)
        if table is not None:
            return table
    sizes_of = {name: size for x in operands if isinstance(x, RankTable) for name, size in zip(x.names, x.sizes)}
    names = tuple(name for name in order if name in sizes_of)
    sizes = tuple(sizes_of[name] for name in names)
    count = math.prod(sizes)
    if count > LARGEST:
        return None
    columns = [x.over(names, sizes) if isinstance(x, RankTable) else (x,) * count for x in operands]
    return RankTable.of_values(names, sizes, tuple(map(function, *columns)))


_KNOWN = {function for function in vars(operator).values() if callable(function)}
_apply_known = lru_cache(maxsize=1024, typed=True)(_apply)  # programs ask the same question in every layer


def _plus(order: tuple[str, ...], one: Any, other: Any, sign: int = 1) -> RankTable | None:
    """Returns `one + sign * other`."""
    base = 0
    steps: dict[str, tuple[int, ...]] = {}
    for x, factor in ((one, 1), (other, sign)):
        if not isinstance(x, RankTable):
            base += factor * x
            continue
        if x.steps is None:
            return None
        base += factor * x.base
        for name, of_axis in zip(x.names, x.steps):
            before = steps.get(name, (0,) * len(of_axis))
            steps[name] = tuple(a + factor * b for a, b in zip(before, of_axis))
    names = [name for name in order if name in steps]
    return RankTable.of_steps(names, base, [steps[name] for name in names])


def _times(order: tuple[str, ...], one: Any, other: Any) -> RankTable | None:
    table, factor = (one, other) if isinstance(one, RankTable) else (other, one)
    if isinstance(factor, RankTable) or table.steps is None:
        return None
    steps = [[step * factor for step in of_axis] for of_axis in table.steps]
    return RankTable.of_steps(table.names, table.base * factor, steps)


def _digits(table: Any, divisor: Any) -> tuple[list[int], list[int]] | None:
    """Returns the axes (indices) that add multiples of the divisor, and the axes whose sum stays below the divisor."""
    if not isinstance(table, RankTable) or isinstance(divisor, RankTable) or table.steps is None or divisor < 1:
        return None
    low = [axis for axis, steps in enumerate(table.steps) if any(step % divisor for step in steps)]
    smallest, largest = (
        table.base % divisor + sum(extreme(table.steps[axis]) for axis in low) for extreme in (min, max)
    )
    if smallest < 0 or largest >= divisor:
        return None
    return [axis for axis in range(len(table.names)) if axis not in low], low


def _quotient(order: tuple[str, ...], table: Any, divisor: Any) -> RankTable | None:
    axes = _digits(table, divisor)
    if axes is None:
        return None
    steps = [[step // divisor for step in table.steps[axis]] for axis in axes[0]]
    return RankTable.of_steps([table.names[axis] for axis in axes[0]], table.base // divisor, steps)


def _remainder(order: tuple[str, ...], table: Any, divisor: Any) -> RankTable | None:
    axes = _digits(table, divisor)
    if axes is None:
        return None
    names, steps = [table.names[axis] for axis in axes[1]], [table.steps[axis] for axis in axes[1]]
    return RankTable.of_steps(names, table.base % divisor, steps)


_SUMS: dict[Callable[..., Any], Callable[..., RankTable | None]] = {
    operator.add: _plus,
    operator.sub: lambda order, one, other: _plus(order, one, other, -1),
    operator.neg: lambda order, one: _times(order, one, -1),
    operator.pos: lambda order, one: one,
    operator.mul: _times,
    operator.floordiv: _quotient,
    operator.mod: _remainder,
}


def _sums(base: int, steps: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns `base` plus one step of each axis, at every combination of coordinates."""
    sums = [base]
    for of_axis in steps:
        sums = [total + step for total, step in product(sums, of_axis)]
    return tuple(sums)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]


def _without_constant_axes(
    names: Sequence[str], sizes: Sequence[int], values: tuple[Any, ...]
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[Any, ...]]:
    """Drops the axes along which the values are equal."""
    varying, varying_sizes, inner = [], [], len(values)
    for name, size in zip(names, sizes):
        block, inner = inner, inner // size
        starts = range(0, len(values), block)
        first = [values[start : start + inner] for start in starts]
        if all(
            same == values[start + index * inner : start + (index + 1) * inner]
            for same, start in zip(first, starts)
            for index in range(1, size)
        ):
            values = tuple(value for same in first for value in same)
        else:
            varying.append(name)
            varying_sizes.append(size)
    return tuple(varying), tuple(varying_sizes), values

"""Numbers with exponents: products of plain numbers and powers of the sizes of axes.

    hidden // comm.size("tp")       AxisSize, exponents {"tp": -1}: hidden in one process, another number for each tp
    1 / comm.size(("dp", "cp"))     AxisRatio, exponents {"dp": -1, "cp": -1}

A number with the exponent k on an axis of N ranks is N^k times what the program would compute in one process. Products,
quotients and integer powers have exponents; so have sums of numbers with the same exponents. Other results are plain
numbers, and so is a number without an exponent left. They are ints and floats for all of Python and torch. Copies keep
the exponents; `int()`, `float()`, `len()`, pickles, and a float on the left do not: Python does not
ask the int in `1.0 / n`, so write `1 / n`.

An exponent may be `UNCLEAR`: that of a size of a tensor that varies, at level L, where shards are not known. It stays
UNCLEAR in products, and changes no scale.

`comm.size` and the like return them while a type checker is active in this thread (`tracked`), and so do shapes of
sharded tensors. `handlers/axis_numbers.py` has their meaning in torch functions.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ... import axis_sizes

__all__ = ["NUMBER_CLASSES", "UNCLEAR", "AxisNumber", "AxisRatio", "AxisSize", "exponents_of", "plain", "tracked"]

NUMBER_CLASSES: set[type] = {bool, float, complex}
"""Classes of numbers that may be equal to an int and mean something else, those of this file included."""

_lock = threading.Lock()
UNCLEAR = None
_Exponent = int | None  # None: UNCLEAR
_Exponents = tuple[tuple[str, _Exponent], ...]  # sorted by axis, none of them 0
_classes: dict[tuple[type, _Exponents], type] = {}


class AxisNumber:
    """A number that is the product of a plain one and powers of the sizes of axes: `AxisSize` or `AxisRatio`.

    There is one class for each kind of number and exponents, so that the class of a number has the exponents.
    """

    exponents: Mapping[str, int] = {}
    _key: _Exponents = ()
    _plain: Any = None  # int or float

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return self._plain, (self._plain(self),)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


class AxisSize(AxisNumber, int):
    """An int with exponents: `AxisSize(2, {"dp": 1})`; a plain int if there are none."""

    _plain = int

    def __new__(cls, value: int, exponents: Mapping[str, _Exponent]) -> AxisSize:
        return _number(int(value), exponents.items())


class AxisRatio(AxisNumber, float):
    """A float with exponents: `AxisRatio(0.5, {"dp": -1})`; a plain float if there are none."""

    _plain = float

    def __new__(cls, value: float, exponents: Mapping[str, _Exponent]) -> AxisRatio:
        return _number(float(value), exponents.items())


def plain(x: AxisNumber) -> int | float:
    """The number without its exponents."""
    return x._plain(x)


def exponents_of(x: Any) -> Mapping[str, int]:
    """The exponents of a number by axis, without UNCLEAR ones; none of a plain number."""
    return x.exponents if isinstance(x, AxisNumber) else {}


def tracked() -> AbstractContextManager[None]:
    """Makes sizes of axes AxisSizes inside the context, in this thread."""
    return axis_sizes.tracked(AxisSize)


def _number(value: Any, exponents: Iterable[tuple[str, _Exponent]]) -> Any:
    """A number with these exponents."""
    key = tuple(sorted((axis, exponent) for axis, exponent in exponents if exponent != 0))
    if not key:
        return value
    plain = float if isinstance(value, float) else int
    class_ = _classes.get((plain, key)) or _new_class(plain, key)
    return plain.__new__(class_, value)


def _new_class(plain: type, key: _Exponents) -> type:
    base = AxisRatio if plain is float else AxisSize
    with _lock:
        if (plain, key) not in _classes:
            clear = {axis: exponent for axis, exponent in key if exponent is not UNCLEAR}
            class_ = type(base.__name__, (base,), {"exponents": clear, "_key": key, "__module__": __name__})
            NUMBER_CLASSES.add(class_)
            _classes[plain, key] = class_
    return _classes[plain, key]


# --- arithmetic


def _combined(one: _Exponents, two: _Exponents, sign: int) -> Iterable[tuple[str, _Exponent]]:
    """The exponents of a product (`sign` 1) or a quotient (-1)."""
    exponents = dict(one)
    for axis, exponent in two:
        before = exponents.get(axis, 0)
        exponents[axis] = UNCLEAR if before is UNCLEAR or exponent is UNCLEAR else before + sign * exponent
    return exponents.items()


def _read(x: Any) -> tuple[Any, _Exponents] | None:
    """An operand as `(plain number, exponents)`; None for a RankValue, whose arithmetic decides."""
    if isinstance(x, AxisNumber):
        return x._plain(x), x._key
    return (x, ()) if x.__class__ in (int, float, bool) else None


def _product(compute: Callable[[Any, Any], Any], sign: int, swapped: bool) -> Callable[[Any, Any], Any]:
    def method(self: AxisNumber, other: Any) -> Any:
        operand = _read(other)
        if operand is None:
            return NotImplemented
        one, two = (operand, _read(self)) if swapped else (_read(self), operand)
        assert one is not None and two is not None
        return _number(compute(one[0], two[0]), _combined(one[1], two[1], sign))

    return method


def _sum(compute: Callable[[Any, Any], Any], swapped: bool) -> Callable[[Any, Any], Any]:
    """A sum or difference, with exponents if both numbers have the same ones; a plain 0 has any."""

    def method(self: AxisNumber, other: Any) -> Any:
        operand = _read(other)
        if operand is None:
            return NotImplemented
        value, key = operand
        number = self._plain(self)
        result = compute(value, number) if swapped else compute(number, value)
        return _number(result, self._key) if key == self._key or (not key and value == 0) else result

    return method


def _same(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: _number(compute(self._plain(self), *args), self._key)


def _power(self: AxisNumber, power: Any, *modulo: Any) -> Any:
    operand = _read(power)
    if operand is None:
        return NotImplemented
    value, key = operand
    result = pow(self._plain(self), value, *modulo)
    whole = isinstance(value, int) and not key and not modulo
    if not whole or not value:
        return result
    return _number(result, ((axis, UNCLEAR if one is UNCLEAR else one * value) for axis, one in self._key))


_METHODS: dict[str, Callable[..., Any]] = {
    **{f"__{name}__": _product(getattr(operator, name), sign, False)
       for name, sign in (("mul", 1), ("truediv", -1), ("floordiv", -1))},
    **{f"__r{name}__": _product(getattr(operator, name), sign, True)
       for name, sign in (("mul", 1), ("truediv", -1), ("floordiv", -1))},
    **{f"__{name}__": _sum(getattr(operator, name), False) for name in ("add", "sub")},
    **{f"__r{name}__": _sum(getattr(operator, name), True) for name in ("add", "sub")},
    **{f"__{name}__": _same(getattr(operator, name)) for name in ("neg", "pos", "abs")},
    **{f"__{name}__": _same(getattr(math, name)) for name in ("ceil", "floor", "trunc")},
    "__round__": _same(round),
    "__pow__": _power,
    "__divmod__": lambda self, other: (self // other, self % other),
    "__rdivmod__": lambda self, other: (other // self, other % self),
}  # fmt: skip
# Set one by one, as in rank_values.py: Python looks special methods up on the class, and int and float define these.
for _name, _method in _METHODS.items():
    setattr(AxisSize, _name, _method)
    setattr(AxisRatio, _name, _method)

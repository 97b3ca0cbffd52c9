"""`Scalar`: a Python number with a type, for numbers that a program computes from a rank or from reduced values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .declarations import assert_type
from .tensor_type import TensorType, note_of
from .types import SpmdType
from .watching import active, no_typecheck

__all__ = ["Scalar"]

_Number = int | float | complex


class Scalar:
    """A number that stands in calls of torch and in arithmetic as a number does, with a declared type.

    Under a check it is a 0-dim tensor of that type, so that the rules of tensors hold: `x * Scalar(rank, {"tp": V})`
    varies over tp. Elsewhere it is the number.

    Args:
        value: the number.
        spmd_type: axis -> type.
    """

    holds_local = True  # the mode lets `__torch_function__` below replace it

    def __init__(self, value: _Number, spmd_type: Mapping[Any, SpmdType]) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float, complex)):
            raise TypeError(f"Scalar: {value!r} is no number: int, float or complex")
        self.value, self.spmd_type = value, dict(spmd_type)

    @property
    def local_type(self) -> dict[Any, SpmdType]:
        """The declared type."""
        return dict(self.spmd_type)

    def tensor(self) -> torch.Tensor:
        """Returns the number as a 0-dim tensor of its type, of the dtype that a Python number counts as."""
        with no_typecheck():
            number = torch.tensor(self.value)
        return assert_type(number, self.spmd_type)

    def __repr__(self) -> str:
        return f"Scalar({self.value!r}, {self.spmd_type})"

    @staticmethod
    def as_laid_out(result: Any) -> Any:
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        checked = active() is not None

        def plain(x: Any) -> Any:
            if isinstance(x, Scalar):
                return x.tensor() if checked else x.value
            return type(x)(map(plain, x)) if type(x) in (list, tuple) else x

        return func(*map(plain, args), **{name: plain(x) for name, x in (kwargs or {}).items()})

    def _with(self, function: Callable[[Any, Any], Any], other: Any, reverse: bool = False) -> Any:
        value = other.value if isinstance(other, Scalar) else other
        if isinstance(value, bool) or not isinstance(value, (int, float, complex)):
            return NotImplemented
        result = function(value, self.value) if reverse else function(self.value, value)
        if active() is None:
            return result
        with torch.no_grad():  # the rules of tensors, on tensors
            operand = other.tensor() if isinstance(other, Scalar) else other
            typed = function(operand, self.tensor()) if reverse else function(self.tensor(), operand)
        note = note_of(typed)
        return Scalar(result, dict(note.type.types if note is not None else TensorType.of({}).types))

    def __add__(self, other: Any) -> Any:
        return self._with(operator.add, other)

    def __radd__(self, other: Any) -> Any:
        return self._with(operator.add, other, reverse=True)

    def __sub__(self, other: Any) -> Any:
        return self._with(operator.sub, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with(operator.sub, other, reverse=True)

    def __mul__(self, other: Any) -> Any:
        return self._with(operator.mul, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with(operator.mul, other, reverse=True)

    def __truediv__(self, other: Any) -> Any:
        return self._with(operator.truediv, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(operator.truediv, other, reverse=True)

    def __floordiv__(self, other: Any) -> Any:
        return self._with(operator.floordiv, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._with(operator.floordiv, other, reverse=True)

    def __neg__(self) -> Scalar:
        return Scalar(-self.value, self.spmd_type)

    def __int__(self) -> int:
        return int(self._known("int"))

    def __float__(self) -> float:
        return float(self._known("float"))

    def __bool__(self) -> bool:
        return bool(self._known("bool"))

    def _known(self, function: str) -> Any:
        """Returns the number, where a plain number of it says no less: its type is R or I on all axes."""
        if active() is not None:
            return getattr(self.tensor(), f"__{function}__")()
        return self.value

"""Numbers that a program reads from tensors (`item()`, `bool()`), which have no values in a check.

A number read from a tensor that is equal on all ranks is 1. A comparison of it, or of a number computed from it, is a
*decision*, equal on all ranks: `Decisions` answers it. `check` plays a step with decisions twice: all are true,
and all are false. `int(x)` and `float(x)` are plain numbers for Python, so that comparisons of them are answered for 1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...call_site import call_site
from .axis_powers import AxisRatio

__all__ = ["Decisions", "ReadFloat", "ReadInt", "number_of"]

_MOST = 100  # equal answers at one line: a loop may wait for the other one

_local = threading.local()


class Decisions:
    """The answers to a program's decisions.

    Attributes:
        answer: the answer to each, but to those of a line that has asked `_MOST` times.
        lines: how often each line has asked.
        reads: how many numbers were read.
    """

    def __init__(self, answer: bool = True) -> None:
        self.answer, self.reads = answer, 0
        self.lines: dict[str, int] = {}

    def decide(self) -> bool:
        """Answers the decision at the caller's line."""
        line = call_site()
        count = self.lines[line] = self.lines.get(line, 0) + 1
        return self.answer if count % (_MOST + 1) else not self.answer

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Lets these decisions answer comparisons inside the context, in this thread."""
        before = getattr(_local, "decisions", None)
        _local.decisions = self
        try:
            yield
        finally:
            _local.decisions = before


class ReadInt(int):
    """An int read from a tensor."""


class ReadFloat(float):
    """A float read from a tensor."""


def number_of(x: Tensor, function: str, decisions: Decisions, scales: dict[str, int]) -> Any:
    """The number in place of the value of `x` that `function` reads; None where that is no number.

    Args:
        scales: the scale of `x` by axis, which the number has as exponents.
    """
    decisions.reads += 1
    if x.dtype.is_complex or function in ("numpy", "__array__", "__dlpack__", "__array_wrap__", "__complex__"):
        return None
    if function in ("__bool__", "__nonzero__", "is_nonzero", "equal", "allclose", "__contains__"):
        return decisions.decide()
    if function in ("__int__", "__index__", "__long__"):
        return 1
    if function == "__float__":
        return 1.0
    if function == "tolist" and x.dim():
        return [number_of(part, function, decisions, scales) for part in x.unbind()]
    if not x.dtype.is_floating_point and "bool" in str(x.dtype):
        return decisions.decide()
    if scales:
        return AxisRatio(1.0, scales)
    return ReadFloat(1.0) if x.dtype.is_floating_point else ReadInt(1)


def _read(value: Any) -> Any:
    """A result of arithmetic as a read number again."""
    if value.__class__ is int:
        return ReadInt(value)
    return ReadFloat(value) if value.__class__ is float else value


def _computed(name: str, plain: type) -> Callable[..., Any]:
    compute = getattr(plain, name)
    return lambda self, *others: _read(compute(self, *others))


def _compared(name: str, plain: type) -> Callable[..., Any]:
    compute = getattr(plain, name)

    def compare(self: Any, *others: Any) -> Any:
        decisions: Decisions | None = getattr(_local, "decisions", None)
        result = compute(self, *others)
        return result if decisions is None or result is NotImplemented else decisions.decide()

    return compare


_ARITHMETIC = "add sub mul truediv floordiv mod pow"
for _class, _plain in ((ReadInt, int), (ReadFloat, float)):
    for _name in [f"__{r}{name}__" for name in _ARITHMETIC.split() for r in ("", "r")] + ["__neg__", "__abs__"]:
        setattr(_class, _name, _computed(_name, _plain))
    for _name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__", "__bool__"):
        setattr(_class, _name, _compared(_name, _plain))
    _class.__hash__ = _plain.__hash__  # type: ignore[method-assign]

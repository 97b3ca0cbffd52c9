"""Calls of `apply = MyFunction.apply`, which a program has bound before the check replaced `Function.apply`.

torch's `apply` in Python ends in that of its base class, which is replaced meanwhile. Where torch's is in C, a call of
a bound one is not seen.
"""

from __future__ import annotations

from typing import Any

from ....spmd.watching import active
from ....torch_internals.autograd import FunctionBase
from .autograd import apply_function, is_checked

__all__ = ["install", "remove"]

_PACKAGE = __name__.partition(".")[0] + "."


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    mode: Any = active()
    if mode is None or is_checked(cls) or cls.__module__.startswith("torch.") or cls.__module__.startswith(_PACKAGE):
        return super(FunctionBase, cls).apply(*args, **kwargs)
    return apply_function(mode, cls, args, kwargs)


def install() -> None:
    """Replaces the base class of `Function.apply`, in which calls of a previously bound `apply` end."""
    FunctionBase.apply = classmethod(_apply)


def remove() -> None:
    """Restores the `apply` that is implemented in C++."""
    del FunctionBase.apply

"""Refusal of unknown keywords of a function with the nearest known one, where Python's own error names none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from .nearest import nearest

__all__ = ["names_the_nearest"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def names_the_nearest(function: _Function, name: str = "", others: Mapping[str, str] | None = None) -> _Function:
    """Returns the function, whose error for an unknown keyword names the nearest one.

    Args:
        name: the function's name for the message; "": its `__name__`.
        others: names of options in other packages -> names here.
    """
    known = [option for option in inspect.signature(function).parameters if option != "self"]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := next((option for option in kwargs if option not in known), ""):
            near = (others or {}).get(unknown) or nearest(unknown, known)
            raise TypeError(f"{name or function.__name__} has no option {unknown!r}; nearest: {near}")
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]

"""Similar names for error messages about an unknown one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

__all__ = ["names_the_nearest", "nearest"]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns the most similar of these names, for a message; the first four if none is similar."""
    known = list(dict.fromkeys(candidates))
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.3)
    return ", ".join([by_lower[name] for name in near] or known[:4])


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

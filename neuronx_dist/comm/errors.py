"""What can go wrong on the wire. One family, so that `except CommError` catches all of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.overrides import handle_torch_function

__all__ = ["CommError", "CommTimeout", "RemoteRankError", "call_site", "call_sites"]

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
_CHECKING = _PACKAGE + os.path.join("checking", "program.py")
_BENEATH = tuple(_PACKAGE + part + os.sep for part in ("comm", "spmd", "checking"))
_COMM = str(Path(__file__).parent) + os.sep
_HANDLE = handle_torch_function.__code__
_TORCH = str(Path(torch.__file__).parent) + os.sep


class CommError(RuntimeError):
    """A collective could not be completed; the message names verb, axis, ranks and call site."""


class CommTimeout(CommError):
    """Some rank did not take part in time: it is slow, stuck, or went another way through the program."""


class RemoteRankError(CommError):
    """Another rank failed first; the message carries that rank's number and its own message."""

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def call_site() -> str:
    """`file:line` of the innermost stack frame outside this package and torch: where the user's code asked for it.

    What a check of whole models calls itself was asked for by nobody: then it is the package's line.
    """
    frame = sys._getframe(1)
    inside = fallback = None
    while frame is not None:
        name = frame.f_code.co_filename
        place = _places.get(name) or _place(name)
        if place == "user":
            return f"{name}:{frame.f_lineno}"
        if place == "torch":
            fallback = fallback or f"{name}:{frame.f_lineno}"
        elif place == "checking":
            inside = inside or f"{name}:{frame.f_lineno}"
            break
        elif place == "package" and inside is None:
            inside = f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return inside or fallback or "an unknown line"


_places: dict[str, str] = {}  # of files: whose they are


def _place(name: str) -> str:
    if not name.startswith(_PACKAGE):
        found = "torch" if name.startswith((_TORCH, "<")) else "user"
    elif name.startswith(_CHECKING):
        found = "checking"
    else:
        found = "beneath" if name.startswith(_BENEATH) else "package"
    if not name.startswith("<"):  # of those there may be any number
        _places[name] = found
    return found


def call_sites() -> tuple[str, str]:
    """The user's line, and that of the innermost frame outside comm/ and torch: the layer that communicates, say."""
    frame = sys._getframe(1)
    inside = user = fallback = None
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        if code is _HANDLE:  # it was handed to a mode, which called it again: who asked for it is further out
            user = None
        elif name.startswith(_COMM):
            if code.co_name == "_whole":  # a verb's own way to hand itself on
                inside = user = None
        elif not name.startswith(_TORCH):
            if name.startswith(_PACKAGE):
                inside = inside or f"{name}:{frame.f_lineno}"
            elif name.startswith("<"):
                fallback = fallback or f"{name}:{frame.f_lineno}"
            elif user is None:
                user = f"{name}:{frame.f_lineno}"
                inside = inside or user
        frame = frame.f_back  # type: ignore[assignment]
    user = user or fallback or "an unknown line"
    return user, inside or user

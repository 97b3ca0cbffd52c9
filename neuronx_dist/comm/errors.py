"""What can go wrong on the wire. One family, so that `except CommError` catches all of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

__all__ = ["CommError", "CommTimeout", "RemoteRankError", "call_site"]

_PACKAGE = str(Path(__file__).parent.parent) + os.sep
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
    """`file:line` of the innermost stack frame outside this package and torch: where the user's code asked for it."""
    frame = sys._getframe(1)
    fallback = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE):
            here = f"{name}:{frame.f_lineno}"
            if not name.startswith(_TORCH) and not name.startswith("<"):
                return here
            fallback = fallback or here
        frame = frame.f_back  # type: ignore[assignment]
    return fallback or "an unknown line"

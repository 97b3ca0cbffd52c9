"""gloo ends the process where data of another size arrives than was expected; here it says first of which collective.

It throws in a thread of its own, where nothing catches it: C++ calls the handler that is set here, in place of the one
that says "terminate called" and aborts. That thread can run Python, since one that waits for a collective does not.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from .errors import CommError
from .slow_waits import descriptions

__all__ = ["install", "uninstall"]

_Handler = ctypes.CFUNCTYPE(None)
_before: Any = None  # the handler that was there
_ours: Any = None  # kept alive


def install(rank: int, report: Callable[[BaseException], None]) -> None:
    """From now on such an end is told to the other ranks by `report`, as an exception is."""
    global _before, _ours
    uninstall()
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate, exception_type = library._ZSt13set_terminatePFvvE, library.__cxa_current_exception_type
    except (OSError, AttributeError):
        return  # another C++ library: gloo's own words have to do
    set_terminate.restype = exception_type.restype = ctypes.c_void_p

    def end() -> None:
        if b"gloo" not in _name(exception_type()):
            _Handler(before)()
        calls = " and ".join(descriptions()) or "no collective"
        error = CommError(
            f"{calls}: data of another size arrived. The ranks called this with different shapes or dtypes, or "
            "called different collectives: NEURONX_DIST_DEBUG=collectives in the environment of all ranks shows both"
        )
        print(f"[rank {rank}] CommError: {error}", file=sys.stderr, flush=True)
        report(error)
        os._exit(1)

    _ours = _Handler(end)
    before = _before = set_terminate(_ours)
    atexit.register(uninstall)  # later no thread can run Python any more


def uninstall() -> None:
    global _before, _ours
    if _ours is not None:
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(ctypes.c_void_p(_before))
        _before = _ours = None


def _name(type_info: int | None) -> bytes:
    """The mangled name in a `std::type_info`, which is behind the pointer to its virtual table."""
    if not type_info:
        return b""
    return ctypes.cast(type_info + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char_p))[0] or b""

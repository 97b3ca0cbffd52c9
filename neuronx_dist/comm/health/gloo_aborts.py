"""A handler that names the collective when gloo aborts the process, as it does for data of an unexpected size.

gloo throws in one of its threads, where nothing catches the exception: C++ calls the handler that is set here, in place
of the one that prints "terminate called" and aborts. The thread can run Python: a thread that waits for a collective
has released the GIL.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

from ..errors import CommError
from .places import descriptions

__all__ = ["install", "uninstall"]

_Handler = ctypes.CFUNCTYPE(None)
_before: Any = None  # the handler before ours
_ours: Any = None  # referenced, so that it is not freed


def install(rank: int, report: Callable[[BaseException], None]) -> None:
    """Reports a gloo abort to the other ranks as a CommError that names this rank's pending collectives."""
    global _before, _ours
    uninstall()
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        set_terminate, exception_type = library._ZSt13set_terminatePFvvE, library.__cxa_current_exception_type
    except (OSError, AttributeError):
        return  # another C++ library: only gloo's message is shown
    set_terminate.restype = exception_type.restype = ctypes.c_void_p

    def end() -> None:
        if b"gloo" not in _name(exception_type()):
            _Handler(before)()
        calls = " and ".join(descriptions()) or "no collective"
        error = CommError(
            f"{calls}: received data of another size. The ranks called this with different shapes or dtypes, or "
            "called different collectives: NEURONX_DIST_DEBUG=collectives in the environment of all ranks shows "
            "both calls"
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
    """Returns the mangled name in a `std::type_info`, which follows the pointer to its virtual table."""
    if not type_info:
        return b""
    return ctypes.cast(type_info + ctypes.sizeof(ctypes.c_void_p), ctypes.POINTER(ctypes.c_char_p))[0] or b""

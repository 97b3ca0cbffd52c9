"""Finds the source line that a message, a record or a report names: the line that made the call.

Every source file has an owner:

    USER       none of the others; a room that is a program: `hide(__name__, USER)`
    LIBRARY    torch, torch_xla, Python's standard library, and code without a file ("<string>")
    PACKAGE    this package: a layer, a pipeline, an optimizer
    MACHINERY  a room of this package that acts for its caller: `hide(__name__)`
    TRANSPORT  the same, below all others: its callers communicate: `hide(__name__, TRANSPORT)`
    DRIVER     a room that calls the user's program: no line outside of it made the call: `hide(__name__, DRIVER)`

A room declares its owner in its `__init__`. No file names another one here, so that rooms can be moved and renamed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import TypeVar

import torch
from torch.overrides import handle_torch_function

__all__ = [
    "DRIVER",
    "LIBRARY",
    "MACHINERY",
    "PACKAGE",
    "TRANSPORT",
    "USER",
    "call_in_words",
    "call_site",
    "call_sites",
    "calling_module",
    "frames",
    "hide",
    "line_of",
    "nearest_line",
    "owner_of",
    "reissues",
]

USER, LIBRARY, PACKAGE = "user", "library", "package"
MACHINERY, TRANSPORT, DRIVER = "machinery", "transport", "driver"

_PACKAGE_FOLDER = str(Path(__file__).parent) + os.sep
_LIBRARY_PREFIXES = (str(Path(torch.__file__).parent) + os.sep, "<")
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_INSTALLED = tuple(_STANDARD_LIBRARY + folder for folder in ("site-packages", "dist-packages"))
_HANDLE_TORCH_FUNCTION = handle_torch_function.__code__

_hidden: dict[str, str] = {}  # prefix of file names -> owner
_owners: dict[str, str] = {}  # file name -> owner
_reissuing: set[CodeType] = set()

_Function = TypeVar("_Function", bound=Callable[..., object])


def hide(module_name: str, owner: str = MACHINERY) -> None:
    """Declares the owner of a module, or of all files of a package. The longest matching prefix of a file name wins."""
    file = sys.modules[module_name].__file__
    assert file is not None
    is_package = hasattr(sys.modules[module_name], "__path__")
    _hidden[os.path.dirname(file) + os.sep if is_package else file] = owner
    _owners.clear()


def reissues(function: _Function) -> _Function:
    """Marks a function that passes its caller's call to a mode, which repeats the call from further inside."""
    _reissuing.add(function.__code__)
    return function


def owner_of(file: str) -> str:
    """Returns the owner of a source file, by the file name in its code objects."""
    owner = _owners.get(file)
    if owner is None:
        standard = file.startswith(_STANDARD_LIBRARY) and not file.startswith(_INSTALLED)
        if file.startswith(_LIBRARY_PREFIXES) or "/torch_xla/" in file:
            owner = LIBRARY
        elif not file.startswith(_PACKAGE_FOLDER):
            owner = LIBRARY if standard else USER
        else:
            prefixes = [prefix for prefix in _hidden if file.startswith(prefix)]
            owner = _hidden[max(prefixes, key=len)] if prefixes else PACKAGE
        if not file.startswith("<"):  # the number of such files is not bounded
            _owners[file] = owner
    return owner


def line_of(frame: FrameType) -> str:
    """Returns the `file:line` of a frame."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def frames(skip: int = 0) -> Iterator[tuple[str, FrameType]]:
    """Yields (owner, frame) of the caller and its callers, innermost first, without the `skip` innermost."""
    frame: FrameType | None = sys._getframe(skip + 1)
    while frame is not None:
        yield owner_of(frame.f_code.co_filename), frame
        frame = frame.f_back


def nearest_line(*owners: str) -> str:
    """Returns the `file:line` of the innermost frame of one of these owners; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if owner_of(frame.f_code.co_filename) in owners:
            return line_of(frame)
        frame = frame.f_back
    return ""


def call_site(frame: FrameType | None = None) -> str:
    """Returns the `file:line` of the innermost frame outside this package and torch: the user's call.

    For calls that a DRIVER makes by itself it is the package's line. `frame`: the innermost frame, of another thread;
    None: the caller's frame.
    """
    frame = frame or sys._getframe(1)
    inside = fallback = None
    while frame is not None:
        name = frame.f_code.co_filename
        owner = _owners.get(name) or owner_of(name)
        if owner is USER:
            return f"{name}:{frame.f_lineno}"
        if owner is LIBRARY:
            fallback = fallback or line_of(frame)
        elif owner is DRIVER:
            inside = inside or line_of(frame)
            break
        elif owner is PACKAGE and inside is None:
            inside = line_of(frame)
        frame = frame.f_back
    return inside or fallback or "an unknown line"


def call_in_words(frame: FrameType | None = None) -> str:
    """Returns `call_site()`, and the function of this package that was called: `train.py:12 (in save_checkpoint)`."""
    frame = frame or sys._getframe(1)
    line, called = call_site(frame), ""
    while frame is not None and (owner := owner_of(frame.f_code.co_filename)) != DRIVER:
        name = frame.f_code.co_name
        if owner == USER:
            return f"{line} (in {called})" if called else line
        if owner == LIBRARY:
            called = ""  # the user's code called torch
        elif owner != TRANSPORT and not name.startswith(("_", "<")):
            called = name
        frame = frame.f_back
    return line


def call_sites() -> tuple[str, str]:
    """Returns the user's line, and that of the innermost frame that is neither TRANSPORT nor torch, as a layer's."""
    frame: FrameType | None = sys._getframe(1)
    inside = user = fallback = None
    while frame is not None:
        code = frame.f_code
        owner = owner_of(code.co_filename)
        if code is _HANDLE_TORCH_FUNCTION:  # passed to a mode, which repeated it: the caller is further out
            user = None
        elif code in _reissuing:
            inside = user = None
        elif code.co_filename.startswith("<"):
            fallback = fallback or line_of(frame)
        elif owner is USER:
            user = user or line_of(frame)
            inside = inside or user
        elif owner is not LIBRARY and owner is not TRANSPORT:
            inside = inside or line_of(frame)
        frame = frame.f_back
    user = user or fallback or "an unknown line"
    return user, inside or user


def calling_module() -> str:
    """Names the innermost module whose code is running: `RowParallelLinear layers.0.mlp.down of Llama`, or "".

    The module is found on the stack, and its path in the outermost module there that contains it: for error messages.
    """
    seen = [frame.f_locals.get("self") for _, frame in frames()]
    running = [module for module in seen if isinstance(module, torch.nn.Module)]
    if not running:
        return ""
    name = type(running[0]).__name__
    for outer in reversed(running):
        whole = getattr(outer, "original_module", outer)  # of a pipeline model
        path = next((path for path, module in whole.named_modules() if module is running[0]), "")
        if path:
            return f"{name} {path} of {type(whole).__name__}"
    return name

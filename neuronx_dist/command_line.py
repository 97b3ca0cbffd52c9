"""Common code of the commands: parsers, numbers of at least 1, importing `file.py:function` and naming its errors."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["command_parser", "count", "load_object", "naming_lines_of"]


def command_parser(description: str, examples: str) -> argparse.ArgumentParser:
    """Returns a parser whose help ends with `examples`, line by line."""
    return argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def count(text: str) -> int:
    """Type of an option that counts something: `add_argument("--stages", type=count)`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)


def load_object(name: str, file: str = "", advice: str = "") -> Any:
    """Imports `file.py:name` or `package.module:name`, and returns the object; a bare `name` is looked up in `file`."""
    module_name, _, attribute = name.rpartition(":")
    module_name = module_name or file
    if not module_name:
        raise _usage_error(f"{name!r} names no file: write file.py:function")
    module = _module(module_name)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise _usage_error(f"{module_name} has no {attribute!r}; it has {_listed(module)}{advice}")
        value = getattr(value, part)
    return value


_modules: dict[str, Any] = {}


def _module(name: str) -> Any:
    if name in _modules:
        return _modules[name]
    if name.endswith(".py"):
        path = Path(name).resolve()
        if not path.is_file():
            raise _usage_error(f"there is no file {name} (seen from {Path.cwd()})")
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))  # as Python does for a script: it may import its neighbours
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(path.stem, module)
        spec.loader.exec_module(module)
    else:
        if not {"", str(Path.cwd())} & {*sys.path}:
            sys.path.insert(0, str(Path.cwd()))  # as `python -m` does; the console script does not
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise _usage_error(f"cannot import {name}: {error}") from None
    _modules[name] = module
    return module


@contextmanager
def naming_lines_of(option: str, name: str) -> Iterator[None]:
    """Adds the file and the line to errors of a user's `file.py:function` or `package.module:function`.

    Raises:
        ValueError: in place of an exception that passed through the file.
    """
    file = name.rpartition(":")[0]
    path = Path(file).resolve()
    tail = None if file.endswith(".py") else Path(*file.split(".")).parts

    def is_of(filename: str | None) -> bool:
        """Returns whether a source file is the user's: of a module, the file whose path ends with its name."""
        if filename is None or tail is None:
            return filename is not None and Path(filename).resolve() == path
        source = Path(filename)
        return (source.parent if source.stem == "__init__" else source.with_suffix("")).parts[-len(tail) :] == tail

    try:
        yield
    except Exception as error:
        frames = traceback.walk_tb(error.__traceback__)
        lines = [line for frame, line in frames if is_of(frame.f_code.co_filename)]
        if isinstance(error, SyntaxError) and is_of(error.filename):
            lines = [error.lineno or 1]
        if not lines:
            raise
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ValueError(f"{option} {name}: {file}:{lines[-1]}: {type(error).__name__}: {text}") from error


def _listed(module: Any) -> str:
    defined = [n for n, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == module.__name__]
    return ", ".join(defined) or "no functions"


def _usage_error(text: str) -> argparse.ArgumentError:
    return argparse.ArgumentError(None, text)

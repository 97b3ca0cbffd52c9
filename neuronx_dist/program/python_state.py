"""State of Python that a module's forward can reach, and of random generators: saved, compared and restored.

A recording saves it before a call of forward, and compares and restores it afterwards:

    attributes of modules and of other objects that are no library's; dicts, lists, sets and deques in them
    class attributes, closures and globals that functions of the user name
    generators of random numbers that a module holds
    functions of the user with an `lru_cache`, which is emptied if a recording has filled it

Tensors and functions are compared by identity: the recorder handles values in tensors.
"""

from __future__ import annotations

import os
import random
import sys
import sysconfig
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..call_site import USER, owner_of
from .recording import describe

__all__ = ["Change", "PythonState", "RandomState", "is_installed", "user_code"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PATHS = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARY_FOLDERS = tuple({str(form) + os.sep for path in _PATHS for form in (path, path.resolve())})
# Packages whose objects, but for modules, have a state that other threads change, and that no forward reads.
_RUN_TIME = frozenset((*sys.stdlib_module_names, "torch", "numpy", __name__.partition(".")[0]))
_LONGEST = 10_000  # items of a container that are looked into
# Entries of a module that the recorder itself replaces while it records.
_OF_RECORDER = frozenset(("_compiled_call_impl",))
_TENSORS = frozenset(("_parameters", "_buffers"))


class Change(NamedTuple):
    """A container or object that forward left in another state.

    Attributes:
        text: the first difference, such as `layers.0.calls: 0 -> 1`.
        apply: sets the state after forward again.
    """

    text: str
    apply: Callable[[], None]


class _Saved(NamedTuple):
    """The content of one container or object, and how to write such content back."""

    path: str
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any]], None]
    content: dict[Any, Any]


class PythonState:
    """The state of Python that the forward of `module` can reach, at the time of construction.

    Attributes:
        names: the globals and attributes named in those functions of the user that forward can reach.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: set[str] = set()
        self._saved: list[_Saved] = []
        self._memos: list[tuple[Any, int]] = []  # functions with an `lru_cache`, and how often they have computed
        self._seen: dict[int, Any] = {}
        walk: list[tuple[str, Any]] = [("", module)]
        while walk:
            path, x = walk.pop()
            if isinstance(x, (*_PLAIN, torch.Tensor, ModuleType)) or id(x) in self._seen:
                continue
            self._seen[id(x)] = x  # alive, so that no other object gets its id
            walk += reversed([*self._within(path, x)])

    def restore(self) -> None:
        """Writes the saved state back, where it differs; tensors of a recording have no values to be remembered."""
        for function, misses in self._memos:
            if function.cache_info().misses != misses:
                function.cache_clear()
        for saved in self._saved:
            if not _same(saved.read(), saved.content):
                saved.write(saved.content)

    def changes(self) -> list[Change]:
        """Returns what differs from the saved state, but for parameters, buffers and what a recorder replaces."""
        changes = []
        for saved in self._saved:
            before, now = ({k: v for k, v in x.items() if k not in _OF_RECORDER} for x in (saved.content, saved.read()))
            if saved.path.rpartition(".")[2] not in _TENSORS and not _same(before, now):
                changes.append(Change(_difference(saved.path, before, now), partial(saved.write, now)))
        return changes

    # --- the walk ---

    def _within(self, path: str, x: Any) -> Iterator[tuple[str, Any]]:
        """Saves the content of an object, and yields the objects in it."""
        if isinstance(x, nn.Module):
            yield from self._of_dict(path, vars(x))
            yield from self._of_class(type(x))
        elif isinstance(x, dict):
            yield from self._of_dict(path, x)
        elif isinstance(x, (list, deque, set)):
            items = list(x)
            self._saved.append(_Saved(path, lambda: dict(enumerate(x)), partial(_refill, x), dict(enumerate(items))))
            yield from ((f"{path}[{n}]", item) for n, item in enumerate(items[:_LONGEST]))
        elif isinstance(x, (tuple, frozenset)):
            yield from ((f"{path}[{n}]", item) for n, item in enumerate([*x][:_LONGEST]))
        elif isinstance(x, torch.Generator):
            self._of_generator(path, x.get_state, x.set_state)
        elif isinstance(x, random.Random):
            self._of_generator(path, x.getstate, x.setstate)
        elif isinstance(x, FunctionType):
            yield from self._of_function(path, x)
        elif hasattr(x, "cache_info") and hasattr(x, "__wrapped__"):
            self._memos.append((x, x.cache_info().misses))
            yield path, x.__wrapped__
        elif isinstance(x, (staticmethod, classmethod)):
            yield path, x.__func__
        elif isinstance(x, MethodType):
            yield from ((path, x.__self__), (path, x.__func__))
        elif isinstance(x, partial):
            yield from ((path, x.func), (path, x.args), (path, x.keywords))
        elif isinstance(x, CellType):
            if _content_of(x):
                self._saved.append(_Saved("", partial(_content_of, x), partial(_fill_cell, x), _content_of(x)))
                yield from _content_of(x).items()
        elif hasattr(x, "__dict__") and not isinstance(x, type) and _is_state(type(x)):
            yield from self._of_dict(path, vars(x))
            yield from self._of_class(type(x))

    def _of_dict(self, path: str, table: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
        content = _entries(table)
        self._saved.append(_Saved(path, partial(_entries, table), partial(_rewrite, table), content))
        for number, (key, item) in enumerate(content.items()):
            if number < _LONGEST:
                of_modules = path.rpartition(".")[2] == "_modules"
                yield f"{path.removesuffix('_modules')}{key}" if of_modules else _joined(path, key), item

    def _of_generator(self, path: str, get: Callable[[], Any], set_state: Callable[[Any], Any]) -> None:
        def read() -> dict[str, Any]:
            state = get()
            text = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)
            states[text] = state
            return {"state": text}

        states: dict[Any, Any] = {}
        self._saved.append(_Saved(path, read, lambda content: set_state(states[content["state"]]), read()))

    def _of_class(self, cls: type) -> Iterator[tuple[str, Any]]:
        """Saves the class attributes of the user's classes, and yields their methods."""
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] in _RUN_TIME or id(base) in self._seen:
                continue
            self._seen[id(base)] = base
            functions = [x for x in vars(base).values() if isinstance(x, FunctionType)]
            if not any(user_code(function.__code__) for function in functions):
                continue
            self._saved.append(_of_names(base.__name__, base, _state_in(vars(base))))
            for name, x in [*vars(base).items()]:
                yield f"{base.__name__}.{name}", x

    def _of_function(self, path: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        """Saves the globals that a function of the user names, and yields them and its closure."""
        if not user_code(function.__code__):
            return
        yield from (("", cell) for cell in function.__closure__ or ())
        named = _names_in(function.__code__)
        self.names |= named
        names = {name for name in named if name in function.__globals__}
        module = sys.modules.get(function.__module__)
        if module is None or vars(module) is not function.__globals__:
            return
        found = {name: function.__globals__[name] for name in sorted(names)}
        if _state_in(found):
            self._saved.append(_of_names(function.__module__, module, _state_in(found)))
        yield from found.items()


@lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Returns whether a source file is the interpreter's, or an installed distribution's in any folder.

    With `pip install --user` or `--target`, and in layered environments, distributions are outside the interpreter's
    folders: then their metadata lists their files. The files of an editable installation are the user's.
    """
    path = Path(file)
    if file.startswith(_LIBRARY_FOLDERS) or str(path.resolve()).startswith(_LIBRARY_FOLDERS):
        return True
    return any(path.relative_to(folder).as_posix() in _listed_files(folder) for folder in path.parents)


@lru_cache(maxsize=256)
def _listed_files(folder: Path) -> frozenset[str]:
    """Returns the files that the metadata of a folder's distributions list, relative to the folder."""
    records = [record.read_text() for record in folder.glob("*.dist-info/RECORD")]
    return frozenset(line.partition(",")[0] for text in records for line in text.splitlines())


def user_code(code: CodeType) -> bool:
    """Returns whether code is the user's: no installed library's, torch's or this package's."""
    file = code.co_filename
    return owner_of(file) is USER and not is_installed(file)


def _is_state(cls: type) -> bool:
    return cls is SimpleNamespace or cls.__module__.partition(".")[0] not in _RUN_TIME


def _of_names(path: str, owner: Any, content: dict[str, Any]) -> _Saved:
    """Saves only these attributes of a class or module, since others may change at the same time."""
    names = [*content]

    def read() -> dict[str, Any]:
        return {name: vars(owner)[name] for name in names if name in vars(owner)}

    def write(values: dict[str, Any]) -> None:
        for name, value in values.items():
            if name not in vars(owner) or vars(owner)[name] is not value:
                setattr(owner, name, value)

    return _Saved(path, read, write, content)


def _state_in(names: Any) -> dict[str, Any]:
    """Returns the entries that are plain values or containers, but for those that Python itself defines."""
    kinds = (*_PLAIN, list, dict, set, deque, tuple)
    return {k: v for k, v in names.items() if isinstance(v, kinds) and not (k.startswith("__") and k.endswith("__"))}


def _names_in(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _content_of(cell: CellType) -> dict[str, Any]:
    try:
        return {"a variable of an enclosing function": cell.cell_contents}
    except ValueError:  # the name is not set yet
        return {}


def _fill_cell(cell: CellType, content: dict[str, Any]) -> None:
    (cell.cell_contents,) = content.values()


# Entries are read and written by the methods of the base: subclasses of transformers make objects where an entry is
# read, or refuse an update.
def _entries(table: dict[Any, Any]) -> dict[Any, Any]:
    base: Any = OrderedDict if isinstance(table, OrderedDict) else dict
    return dict(base.items(table))


def _rewrite(table: dict[Any, Any], content: dict[Any, Any]) -> None:
    base: Any = OrderedDict if isinstance(table, OrderedDict) else dict
    base.clear(table)
    for key, value in content.items():
        base.__setitem__(table, key, value)


def _refill(container: Any, content: dict[int, Any]) -> None:
    container.clear()
    getattr(container, "update" if isinstance(container, set) else "extend")(content.values())


def _same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return a.keys() == b.keys() and all(_equal(x, b[key]) for key, x in a.items())


def _equal(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and isinstance(x, _PLAIN) and x == y)


def _difference(path: str, before: dict[Any, Any], now: dict[Any, Any]) -> str:
    for key in {**before, **now}:
        if key not in before or key not in now or not _equal(before[key], now[key]):
            old, new = (describe(x[key]) if key in x else "absent" for x in (before, now))
            return f"{_joined(path, key)}: {old} -> {new}"
    return path


def _joined(path: str, key: Any) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key!r}]"


class RandomState:
    """The states of the global generators of Python, numpy and torch (on the host), to compare and restore.

    Ranks that are threads share these generators, so that no change is reported, and no state is restored.
    """

    def __init__(self) -> None:
        self._shared = threading.current_thread() is not threading.main_thread()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random
        self._torch = torch.get_rng_state()
        self._states = self._now()

    def _now(self) -> dict[str, Any]:
        states: dict[str, Any] = {"random": random.getstate()}
        if self._numpy is not None:
            name, words, *others = self._numpy.get_state()
            states["numpy.random"] = (name, tuple(words.tolist()), *others)
        return states

    def changed(self) -> list[str]:
        """Returns the names of the generators whose state has changed."""
        if self._shared:
            return []
        now = self._now()
        names = [name for name, state in self._states.items() if state != now[name]]
        return names if torch.equal(self._torch, torch.get_rng_state()) else [*names, "torch"]

    def restore(self) -> None:
        if self._shared:
            return
        random.setstate(self._states["random"])
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            self._numpy.set_state(self._states["numpy.random"])

    def seed_otherwise(self) -> None:
        """Sets the generators of Python and numpy to states that differ from the saved and the present one."""
        random.seed(random.getrandbits(64))
        if self._numpy is not None:
            self._numpy.seed(random.getrandbits(32))

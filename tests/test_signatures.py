"""Every default value of the package, in `signatures.txt`: one that changes is a line there, which its review reads.

Of all that a module lists in `__all__`, and of the public methods of its classes. NXD_UPDATE_SIGNATURES=1 writes the
file anew.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import neuronx_dist

FILE = Path(__file__).parent / "signatures.txt"
SKIPPED = ("neuronx_dist.xla_replay", "neuronx_dist.comm.backends.xla", "neuronx_dist.__main__")  # need torch_xla
LAZY = [f"neuronx_dist.{name}" for name in ("checking", "comm", "comm.backends", "parallel_layers", "pipeline", "spmd")]


def value_in_words(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


def defaults_of(function: Any) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of builtins
        return ""
    return ", ".join(f"{one.name}={value_in_words(one.default)}" for one in parameters if one.default is not one.empty)


def signatures() -> Iterator[str]:
    for module_info in pkgutil.walk_packages(neuronx_dist.__path__, "neuronx_dist."):
        if module_info.name.startswith(SKIPPED):
            continue
        module = importlib.import_module(module_info.name)
        for name in getattr(module, "__all__", ()):
            value = inspect.getattr_static(module, name, None)
            if getattr(value, "__module__", "") != module.__name__ or not callable(value):
                continue
            where = f"{module.__name__.removeprefix('neuronx_dist.')}.{name}"
            members = vars(value) if isinstance(value, type) else {}
            public = {key: getattr(value, key) for key, one in members.items() if key[0] != "_" and callable(one)}
            for label, function in ((where, value), *((f"{where}.{key}", one) for key, one in public.items())):
                if defaults := defaults_of(function):
                    yield f"{label}: {defaults}"


def test_defaults_are_what_was_reviewed():
    now = sorted(signatures())
    if os.environ.get("NXD_UPDATE_SIGNATURES"):
        FILE.write_text("\n".join(now) + "\n")
    assert now == FILE.read_text().splitlines()


def test_every_lazy_name_resolves():
    """A table of lazy names may name what is not there: nobody notices before a user asks."""
    modules = [importlib.import_module(name) for name in LAZY]
    for module in (neuronx_dist, *modules):
        resolve = vars(module)["__getattr__"]
        for name in inspect.getclosurevars(resolve).nonlocals["modules"]:
            assert resolve(name) is getattr(module, name)
        assert set(getattr(module, "__all__", ())) <= {*dir(module)}
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            module.__getattr__("nothing")
    assert dir(neuronx_dist) == sorted(neuronx_dist.__all__)

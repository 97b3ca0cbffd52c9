"""The names that users import, and their parameters, in `signatures.txt`: a change is a line there, which is reviewed.

Functions, classes and the public methods of classes; an inherited method stands under the first class that has it.
Parameters are named in order, with `=` after one that has a default. Defaults themselves are held where another package
has them: `tests/compat`, `parallelize/test_seed_api.py`, `parallel_layers/test_signatures.py`. Internal modules are
left out. NXD_UPDATE_SIGNATURES=1 writes the file anew.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterator
from enum import EnumMeta
from pathlib import Path
from typing import Any

import pytest

import neuronx_dist
from tests.support.public_names import PUBLIC, WITH_PACKAGES, public_names

FILE = Path(__file__).parent / "signatures.txt"
LAZY = [f"neuronx_dist.{name}" for name in ("checking", "comm", "comm.backends", "parallel_layers", "pipeline", "spmd")]


class _Some:
    def __repr__(self) -> str:
        return ""


SOME = _Some()  # in the place of any default


def parameters_of(function: Any) -> str:
    """`(x, dim=, *, async_op=)`: the parameters, and which of them have a default."""
    if isinstance(function, EnumMeta):  # whose signature depends on the version of Python
        return ""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of builtins
        return ""
    named = [one.replace(annotation=one.empty) for one in parameters]
    shown = inspect.Signature([one if one.default is one.empty else one.replace(default=SOME) for one in named])
    return re.sub(r"^\(self(, )?", "(", str(shown))


def public_methods(cls: type) -> dict[str, Any]:
    """The methods by name, inherited ones too as far as this package defines them."""
    names = {
        name
        for base in cls.__mro__
        if base.__module__.startswith("neuronx_dist")
        for name, value in vars(base).items()
        if name[0] != "_" and callable(value)
    }
    return {name: getattr(cls, name) for name in names}


def signatures() -> Iterator[str]:
    """A line for each name; an object of several names has its parameters and methods under the first."""
    recorded: set[Any] = set()
    for module_name in ["", *PUBLIC]:
        module = importlib.import_module(f"neuronx_dist.{module_name}".rstrip("."))
        for name in public_names(module):
            value, label = getattr(module, name), f"{module_name}.{name}".lstrip(".")
            if id(value) in recorded or not callable(value):
                yield label
                continue
            recorded.add(id(value))
            yield label + parameters_of(value)
            for key, method in public_methods(value).items() if isinstance(value, type) else ():
                function = inspect.unwrap(
                    getattr(method, "__func__", method)
                )  # torch wraps `step` at the first instance
                if function not in recorded:
                    recorded.add(function)
                    yield f"{label}.{key}{parameters_of(method)}"


def test_public_names_and_parameters_are_those_that_were_reviewed():
    current = sorted(signatures())
    if os.environ.get("NXD_UPDATE_SIGNATURES"):
        FILE.write_text("\n".join(current) + "\n")
    assert current == FILE.read_text().splitlines()


# Rooms with an `__all__` whose names users get from other modules, or by other packages' names.
INTERNAL = {"attention", "checking.types", "hf.trainer", "pipeline.schedule", "rules", "shard_tensor.ops", "xla_replay"}


def test_a_room_with_names_is_public_or_internal():
    """A new room with an `__all__` gets a line in `tests/support/public_names.py`: the site has its names then."""
    package = Path(neuronx_dist.__file__).parent
    pages = [path for path in package.rglob("__init__.py") if "\n__all__ = " in path.read_text()]
    rooms = {".".join(path.relative_to(package).parts[:-1]) for path in pages} - {""}
    unlisted = {room for room in rooms - {*PUBLIC, *WITH_PACKAGES} - INTERNAL if not room.startswith("compat")}
    assert unlisted == set()


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

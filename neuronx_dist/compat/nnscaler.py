"""Installs the import name `nnscaler`: scripts for nnScaler's `parallelize` and `Trainer` run on this package.

    import neuronx_dist.compat.nnscaler  # before the first import of nnscaler

`nnscaler.cli` and its modules are `neuronx_dist.parallelize.cli`, `nnscaler.parallel` is `neuronx_dist.parallelize`;
nnScaler's other modules, of its graphs and generated code, are not there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from .. import comm, parallelize
from ..parallel_layers.parallel_state import destroy_model_parallel
from ..parallelize import cli
from ..parallelize.cli.arg_parser import MODULES, load_type

__all__ = ["install"]


def set_default_logger_level(level: int | str) -> None:
    """Sets the level of all loggers that have none."""
    logging.basicConfig(level=level, force=True)


def rank_zero_only(fn: Callable[..., None]) -> Callable[..., None]:
    """Returns the function as one that does nothing on ranks other than 0."""

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        if not comm.is_initialized() or comm.rank("world") == 0:
            fn(*args, **kwargs)

    return wrapped


def constant_folding(constant_folding: bool = True) -> AbstractContextManager[None]:
    """Returns an empty context: shapes and plain numbers are constants of a recording in any case."""
    return nullcontext()


def fold_constant(a: Any) -> Any:
    """Returns the value: shapes and plain numbers are constants of a recording in any case."""
    return a


_FUNCTIONS: dict[str, dict[str, Any]] = {
    "": {
        "constant_folding": constant_folding,
        "fold_constant": fold_constant,
        "init": comm.launch.init_distributed,
        "no_constant_folding": partial(constant_folding, False),
        "uninit": destroy_model_parallel,
    },
    "utils": {
        "load_type": load_type,
        "rank_zero_only": rank_zero_only,
        "set_default_logger_level": set_default_logger_level,
    },
}


def install() -> None:
    """Makes `nnscaler` this package in this process.

    Raises:
        RuntimeError: the published package is imported already.
    """
    present = sys.modules.get("nnscaler")
    if present is not None and not hasattr(present, "is_neuronx_dist"):
        raise RuntimeError(
            f"nnscaler is imported already, from {getattr(present, '__file__', None)}: import "
            "neuronx_dist.compat.nnscaler before anything that imports nnscaler"
        )
    modules = {"": ModuleType("nnscaler", __doc__), "utils": ModuleType("nnscaler.utils")}
    modules[""].__dict__.update({name: getattr(parallelize, name) for name in parallelize.__all__})
    modules[""].__dict__["is_neuronx_dist"] = True
    for name, functions in _FUNCTIONS.items():
        modules[name].__dict__.update(functions)
    names = {"cli": "cli", **{f"cli.{file.name}": f"cli.{file.name}" for file in iter_modules(cli.__path__)}, **MODULES}
    for name, path in names.items():
        modules[name] = load_type(f"{parallelize.__name__}.{path}".strip("."))
    for name in [*names, "utils"]:
        while name:
            parent, _, child = name.rpartition(".")
            holder = modules.setdefault(parent, ModuleType(f"nnscaler.{parent}"))
            setattr(holder, child, modules[name])
            name = parent
    for module in modules.values():
        module.__dict__.setdefault("__path__", [])  # so that submodules are looked for
    sys.modules.update({f"nnscaler.{name}".strip("."): module for name, module in modules.items()})


install()

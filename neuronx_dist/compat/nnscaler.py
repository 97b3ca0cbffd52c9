"""Installs the import name `nnscaler`: scripts for nnScaler's `parallelize` and `Trainer` run on this package.

    import neuronx_dist.compat.nnscaler  # before the first import of nnscaler

`nnscaler.cli` and its modules are `neuronx_dist.parallelize.cli`, `nnscaler.parallel` is `neuronx_dist.parallelize`;
nnScaler's other modules, of its graphs and generated code, are not there.
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType

from .. import comm, parallelize
from ..parallel_layers.parallel_state import destroy_model_parallel
from ..parallelize import cli
from ..parallelize.cli import arg_parser, loggers, train, train_hook, trainer, trainer_args
from ..parallelize.policy import graph
from ..parallelize.train import parallel_module

__all__ = ["install"]

_MODULES: dict[str, ModuleType] = {
    "cli": cli,
    "cli.arg_parser": arg_parser,
    "cli.loggers": loggers,
    "cli.loggers.logger_base": loggers,
    "cli.loggers.tensorboard": loggers,
    "cli.loggers.wandb": loggers,
    "cli.train": train,
    "cli.train_hook": train_hook,
    "cli.trainer": trainer,
    "cli.trainer_args": trainer_args,
    "graph": graph,
    "graph.graph": graph,
    "graph.parser.register": parallelize,
    "graph.segment": graph,
    "ir.operator": graph,
    "parallel": parallelize,
    "runtime.module": parallel_module,
    "utils": ModuleType("nnscaler.utils"),
}


def set_default_logger_level(level: int | str) -> None:
    """Sets the level of all loggers that have none."""
    logging.basicConfig(level=level, force=True)


_MODULES["utils"].__dict__["set_default_logger_level"] = set_default_logger_level


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
    top = ModuleType("nnscaler", __doc__)
    top.__dict__.update({name: getattr(parallelize, name) for name in parallelize.__all__})
    top.__dict__.update(init=comm.launch.init_distributed, uninit=destroy_model_parallel, is_neuronx_dist=True)
    modules = {"nnscaler": top}
    for name, module in _MODULES.items():
        parent, _, child = f"nnscaler.{name}".rpartition(".")
        setattr(modules.setdefault(parent, ModuleType(parent)), child, module)
        modules[f"nnscaler.{name}"] = module
    for module in modules.values():
        module.__dict__.setdefault("__path__", [])  # so that submodules are looked for
    top.__dict__.update(ir=modules["nnscaler.ir"], runtime=modules["nnscaler.runtime"])
    sys.modules.update(modules)


install()

"""The class that an emitted file defines, imported: its values, its configuration, its forward as users call it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import torch

from ...program.program import FILE_NAMES, argument_name
from ...program.recording import register_dataclass
from ..config import ComputeConfig
from .parallel_module import ParallelModule

__all__ = ["parallel_class"]


def parallel_class(
    module: ModuleType,
    compute_config: ComputeConfig,
    weights: Callable[[], Mapping[str, torch.Tensor]],
    constants: Mapping[str, torch.Tensor],
) -> type[ParallelModule]:
    """Returns the class that an emitted file defines, with its values and its configuration.

    Args:
        module: the file, imported.
        weights: reads the whole initial values by name; called when a module is made with `init_params=True`.
        constants: tensors of the program that the original has under no name.

    Raises:
        ImportError: the file defines no `ParallelModule`.
    """
    classes = [cls for cls in vars(module).values() if inspect.isclass(cls)]
    for cls in classes:  # this process may not have recorded
        if is_dataclass(cls):
            register_dataclass(cls)
    for cls in classes:
        if issubclass(cls, ParallelModule) and cls.__module__ == module.__name__:
            cls.WEIGHTS, cls.CONSTANTS, cls.compute_config = staticmethod(weights), constants, compute_config
            cls.run = cls.forward = _with_random_numbers(cls, _with_names_of_arguments(cls.forward))
            if compute_config.use_end2end:
                cls.forward = _refused
            return cls
    raise ImportError(f"{module.__file__} defines no ParallelModule: parallelize did not write this file")


def _with_names_of_arguments(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward that takes its arguments by the names of the original."""
    parameters = inspect.signature(forward).parameters
    renamed = {name: argument_name(name) for name in FILE_NAMES if argument_name(name) in parameters}

    @wraps(forward)
    def by_name(self: ParallelModule, /, *args: Any, **given: Any) -> Any:
        return forward(self, *args, **{renamed.get(name, name): value for name, value in given.items()})

    return by_name if renamed else forward


def _with_random_numbers(cls: type[ParallelModule], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward whose whole values get equal random numbers on all ranks of a unit."""
    if not cls.DRAWS:
        return forward

    @wraps(forward)
    def drawing(self: ParallelModule, /, *args: Any, **given: Any) -> Any:
        with self._random_numbers():
            return forward(self, *args, **given)

    return drawing


def _refused(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        f"{type(self).__name__} is end2end: call train_step or infer_step; to call forward, compile it with "
        "ComputeConfig(use_end2end=False)"
    )

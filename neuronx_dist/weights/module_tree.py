"""A model's modules and the places where parameters are registered, cached until the model changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from operator import eq
from typing import NamedTuple

from torch import nn

from .partial_model import join

__all__ = ["ModuleTree", "ParameterSlot"]


class ParameterSlot(NamedTuple):
    """The place `module._parameters[key]` of the parameter that the model calls `name`."""

    name: str
    module: nn.Module
    key: str

    @property
    def parameter(self) -> nn.Parameter:
        param = self.module._parameters[self.key]
        assert param is not None
        return param


class ModuleTree:
    """The modules and parameters below a module, without torch's generators, which take microseconds for each.

    It holds no parameters, which may be replaced and are then to be freed: they are looked up.

    Attributes:
        modules: those of `root.modules()`.
        slots: those of `root.named_parameters(remove_duplicate=False)`.
    """

    def __init__(self, root: nn.Module) -> None:
        named = list(root.named_modules(remove_duplicate=False))
        self.modules = list(dict.fromkeys(module for _, module in named))
        self.slots = [
            ParameterSlot(join(prefix, key), module, key)
            for prefix, module in named
            for key, param in module._parameters.items()
            if param is not None
        ]
        self._children = [dict(module._modules) for module in self.modules]
        self._parameters = self._parameters_now()

    def is_current(self) -> bool:
        """Returns whether a walk would find the same modules and parameters now."""
        children = [module._modules for module in self.modules]
        return (
            children == self._children
            and all(map(eq, chain.from_iterable(children), chain.from_iterable(self._children)))  # in the same order
            and self._parameters_now() == self._parameters
        )

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yields each parameter under each of its names."""
        return (slot.parameter for slot in self.slots)

    def _parameters_now(self) -> tuple[list[int], list[str], list[int]]:
        """Returns each module's number of parameters, their names and their `id`s (tensors do not compare)."""
        tables = [module._parameters for module in self.modules]
        ids = map(id, chain.from_iterable([table.values() for table in tables]))
        return list(map(len, tables)), list(chain.from_iterable(tables)), list(ids)

"""A small model of a package that others wrote: how it is made, its inputs, and the dims of these that are sharded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = Callable[[], dict[str, torch.Tensor]]
Dims = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Model:
    """A model, and a call of it.

    Attributes:
        make: returns the module.
        inputs: returns the tensors of a call: "0", "1", .. by position, others by name.
        dims: of each input that is sharded, the dims that layouts call rows and columns.
        output: the member of the result that is compared; None: all tensors.
    """

    make: Callable[[], nn.Module]
    inputs: Inputs
    dims: Dims
    output: str | None = None


def of(path: str, inputs: Inputs, dims: Dims, /, *args: Any, output: str | None = None, **options: Any) -> Model:
    """The model of a class or a function, "module:name", with these arguments."""

    def make() -> nn.Module:
        module, _, name = path.partition(":")
        made: nn.Module = getattr(importlib.import_module(module), name)(*args, **options)
        return made

    return Model(make, inputs, dims, output)


def tensor(*shape: int, name: str = "0") -> Inputs:
    return lambda: {name: torch.randn(shape)}


IMAGE: Dims = {"0": (2, 3)}
SMALL, LARGE = tensor(2, 3, 32, 32), tensor(2, 3, 64, 64)

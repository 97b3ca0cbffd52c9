"""Removal of the hooks that a step registers on a model: the next rank that is played registers them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...torch_internals.tensors import backward_hooks, post_accumulate_hooks

__all__ = ["kept_hooks"]


@contextmanager
def kept_hooks(model: nn.Module) -> Iterator[None]:
    """Restores the hooks of a model's modules and parameters."""
    before = {(id(owner), name): dict(table) for owner, name, table in _tables(model)}
    try:
        yield
    finally:
        for owner, name, table in _tables(model):
            table.clear()
            table.update(before.get((id(owner), name), {}))


def _tables(model: nn.Module) -> Iterator[tuple[Any, str, dict[Any, Any]]]:
    for module in model.modules():
        for name, table in vars(module).items():
            if "hooks" in name and isinstance(table, dict):
                yield module, name, table
    for param in model.parameters():
        for name, table in (("backward", backward_hooks(param)), ("post_accumulate", post_accumulate_hooks(param))):
            if table is not None:
                yield param, name, table

"""The types of a played program's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...spmd.tensor_type import write
from ...spmd.types import LocalType, Shard
from ...torch_internals.tensors import pytree
from ..types.declared import input_type
from ..types.mode import SpmdTypeMode

__all__ = ["declare_inputs"]

NUM_ITEMS = "num_items_in_batch"  # Hugging Face's name of the result of `global_num_items`


def declare_inputs(inputs: Any, in_types: Any, mode: SpmdTypeMode) -> None:
    """Writes the types of inputs.

    Args:
        in_types: `{axis: type}` for all of them, or such dicts by name (of a dict of inputs) or in a list (of
            positional ones); else sharded on dim 0 over dp, and equal on the other axes;
            `num_items_in_batch` is a rank's share of a count.

    Raises:
        ValueError: a name that no input has.
    """
    assert mode.mesh is not None
    if isinstance(in_types, Mapping) and isinstance(inputs, Mapping) and not _is_type(in_types):
        unknown = sorted(set(in_types) - set(inputs))
        if unknown:
            raise ValueError(f"in_types names {', '.join(unknown)}, but the inputs are {', '.join(map(str, inputs))}")
    for path, x in pytree.tree_flatten_with_path(inputs)[0]:
        if isinstance(x, torch.Tensor):
            declared = in_types if in_types is None or _is_type(in_types) else _at(in_types, path)
            share = bool(path) and getattr(path[-1], "key", None) == NUM_ITEMS
            write(x, input_type(x, mode.mesh, declared, mode.level, share), None, mode.session)


def _is_type(in_types: Any) -> bool:
    """Returns whether `in_types` is `{axis: type}`."""
    return isinstance(in_types, Mapping) and all(isinstance(value, (LocalType, Shard)) for value in in_types.values())


def _at(in_types: Any, path: tuple[Any, ...]) -> Mapping[Any, Any] | None:
    """The types at a path, or at the nearest container around it."""
    for entry in path:
        key = getattr(entry, "key", getattr(entry, "idx", None))
        try:
            in_types = in_types[key]
        except (KeyError, IndexError, TypeError):
            return None
        if _is_type(in_types):
            return in_types
    return in_types if isinstance(in_types, Mapping) else None

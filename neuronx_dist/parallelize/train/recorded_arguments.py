"""Comparison of a call's arguments with those that the program was recorded with."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

import torch

from ...program.recording import describe
from ...torch_internals.tensors import pytree

__all__ = ["at_path", "check_arguments"]


def check_arguments(
    class_name: str,
    inputs: Mapping[str, tuple[list[int], torch.dtype]],
    fixed: Mapping[str, Any],
    given: Mapping[str, Any],
) -> None:
    """Raises ValueError if arguments differ from the recorded ones in structure, shape, dtype or plain values.

    Args:
        inputs: shape and dtype of each recorded tensor, by its path in the arguments.
        fixed: recorded plain values, by name or path.
    """
    for path, (shape, dtype) in inputs.items():
        x = at_path(given, path)
        if not isinstance(x, torch.Tensor) or list(x.shape) != shape or x.dtype != dtype:
            has = f"{list(x.shape)} {x.dtype}" if isinstance(x, torch.Tensor) else "missing" if x is None else repr(x)
            raise ValueError(
                f"{class_name}: {path} is {has}, but the program was recorded with {shape} {dtype}: "
                "call parallelize with dummy_forward_args of these shapes, or pad the input"
            )
    for name, value in fixed.items():
        x = at_path(given, name)
        if x is not value and (isinstance(x, torch.Tensor) or x != value):
            has = repr(x) if isinstance(x, Enum) else describe(x)
            raise ValueError(
                f"{class_name}: {name}={has}, but the program was recorded with {value!r}: "
                "call parallelize with this value among dummy_forward_args, or with a tensor if the value varies"
            )
    for path, names in _containers((*inputs, *fixed)).items():
        x = at_path(given, path)
        items = x if isinstance(x, Mapping) else dict(enumerate(x)) if isinstance(x, (list, tuple)) else {}
        more = [key for key, item in items.items() if str(key) not in names and pytree.tree_leaves(item)]
        if more:
            raise ValueError(
                f"{class_name}: {path} has {', '.join(map(repr, more))}, but the program was recorded "
                f"with only {', '.join(sorted(names))}: call parallelize with dummy_forward_args of this structure"
            )


def at_path(x: Any, path: str) -> Any:
    """Returns the object at a path of keys, positions and attributes; None: there is none."""
    for part in path.split(".") if path else ():
        if isinstance(x, Mapping):
            x = x.get(part, x.get(int(part)) if part.isdigit() else None)
        elif isinstance(x, (list, tuple)) and part.isdigit():
            x = x[int(part)] if int(part) < len(x) else None
        else:
            x = getattr(x, part, None)
    return x


@cache
def _containers(paths: tuple[str, ...]) -> dict[str, set[str]]:
    """Returns the names in each container, by the container's path, from the paths of all leaves."""
    containers: dict[str, set[str]] = {}
    for path in paths:
        while "." in path:
            path, _, name = path.rpartition(".")
            containers.setdefault(path, set()).add(name)
    return containers

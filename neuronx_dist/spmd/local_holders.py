"""Tensors that hold this rank's local tensor, as ShardTensor does: their handlers run a layer's function."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import has_torch_function

__all__ = ["holds_local", "local_tensor"]


def holds_local(*args: Any) -> bool:
    """Returns whether one of `xs` holds a local tensor: its class has `holds_local = True`, and function handlers."""
    return has_torch_function(args) and any(getattr(type(x), "holds_local", False) for x in args)


def local_tensor(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that `x` holds; any other tensor unchanged."""
    local: torch.Tensor = x.to_local() if holds_local(x) else x  # type: ignore[attr-defined]
    return local

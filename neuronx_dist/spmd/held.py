"""Tensors that hold this rank's local tensor, as ShardTensor does: their handlers run a layer's function."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import has_torch_function

__all__ = ["holds_local", "local_tensor"]


def holds_local(*args: Any) -> bool:
    """Whether one of these is such a tensor: its class says `holds_local = True`, and has handlers for functions."""
    return has_torch_function(args) and any(getattr(type(x), "holds_local", False) for x in args)


def local_tensor(x: torch.Tensor) -> torch.Tensor:
    """The tensor that it holds; any other tensor itself."""
    local: torch.Tensor = x.to_local() if holds_local(x) else x  # type: ignore[attr-defined]
    return local

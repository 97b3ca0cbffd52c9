"""Random streams as the replayed ranks use them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import neuronx_dist as nxd
from neuronx_dist.spmd.random import checkpoint, streams


def masks(seed: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Dropout from the default stream, twice from the tensor-parallel one, and from the default one again."""
    nxd.model_parallel_manual_seed(seed)
    found = {"default": F.dropout(x, 0.5)}
    for name in ("first", "second"):
        with streams().fork():
            found[name] = F.dropout(x, 0.5)
    found["default again"] = F.dropout(x, 0.5)
    nxd.model_parallel_manual_seed(seed)
    with streams().fork():
        found["first, repeated"] = F.dropout(x, 0.5)
    return found


def recomputed(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients with and without activation checkpointing, of functions that draw from both streams."""

    def function(leaf: torch.Tensor) -> torch.Tensor:
        with streams().fork():
            inner = F.dropout(leaf.sin(), 0.5)
        return F.dropout(inner * leaf, 0.5).square()

    found = {}
    for name, call in (("plain", function), ("checkpointed", lambda leaf: checkpoint(function, leaf))):
        nxd.model_parallel_manual_seed(3)
        leaf = x.detach().clone().requires_grad_()
        call(leaf).sum().backward()
        found[name] = leaf.grad
        found[name + ", next"] = F.dropout(x, 0.5)
    return found

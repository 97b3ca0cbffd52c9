"""What a training step leaves to the next one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["training_state"]


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """All tensors that a step of training starts from.

    Parameters and buffers of the model; master weights, state and tensor options (a learning rate on the device) of the
    optimizer, and of the one that it wraps.
    """
    state: dict[str, Any] = {"model": {**dict(model.named_parameters()), **dict(model.named_buffers())}}
    optimizers = {"optimizer": optimizer, "base": getattr(optimizer, "base_optimizer", None)}
    for name, each in optimizers.items():
        if each is None:
            continue
        params = [param for group in each.param_groups for param in group["params"]]
        state[name] = {
            "params": params,
            "state": [dict(each.state[param]) if param in each.state else {} for param in params],
            "options": [{key: group[key] for key in group if key != "params"} for group in each.param_groups],
        }
    return state

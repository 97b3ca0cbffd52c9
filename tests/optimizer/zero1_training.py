"""Training the synthetic model with ZeRO-1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.parallel_layers import grads
from tests.support.synthetic import LAYOUTS, Model, mean_gradient, weight

STEPS = 5
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.1, weight_decay=0.1, eps=1e-6)),
}


def train(
    model: Model, optimizer: NeuronZero1Optimizer, first: int = 0, last: int = STEPS, average: bool = False
) -> list[torch.Tensor]:
    """The norms of the steps from `first` to `last`."""
    norms = []
    for step in range(first, last):
        optimizer.zero_grad()
        model.set_gradients(step)
        grads.reduce_gradients(model, average_over_data=average)
        optimizer.step()
        norms.append(optimizer.grad_norm)
    return norms


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def train_whole(
    mesh: Mesh, optimizer: str, max_norm: float, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[nn.Parameter]]:
    """Norms and weights of one process."""
    params = [nn.Parameter(weight(name, dtype)) for name in LAYOUTS]
    cls, options = OPTIMIZERS[optimizer]
    torch_optimizer = cls(params, **options)
    norms = []
    for step in range(STEPS):
        for name, param in zip(LAYOUTS, params):
            param.grad = mean_gradient(name, step, mesh, dtype)
        norms.append(torch.nn.utils.clip_grad_norm_(params, max_norm))
        torch_optimizer.step()
    return norms, params

"""Training the synthetic model with ZeRO-1."""

from __future__ import annotations

import torch
from torch import nn

from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.parallel_layers import grads
from tests.support.synthetic import Model

STEPS = 5


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

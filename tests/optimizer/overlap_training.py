"""A small model that trains with `overlap=True` and without (test_overlap*.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from tests.optimizer.zero1_training import STEPS
from tests.support.synthetic import Model

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01)),
    "AdamW": (torch.optim.AdamW, dict(lr=0.1, weight_decay=0.1)),
}
SMALL = dict(bucket_cap_mb_all_gather=4e-6, bucket_cap_mb_reduce_scatter=4e-6)  # 4 bytes: each tensor is a bucket
LAYERS, WIDTH = 4, 4


class Chain(nn.Module):
    """Layers one after the other, and a weight of its own that it uses itself, not by a layer's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.scale = nn.Parameter(torch.empty(WIDTH))
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.normal_(param, generator=generator)

    def forward(
        self, x: torch.Tensor, without: Sequence[int] = (), layer: Callable[..., torch.Tensor] = lambda f, x: f(x)
    ) -> torch.Tensor:
        for number, block in enumerate(self.layers):
            x = x if number in without else torch.tanh(layer(block, x))
        return (x * self.scale).square().mean()


def rows(step: int, rank: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + (comm.rank(("dp", "cp")) if rank is None else rank))
    return torch.randn(3, WIDTH, generator=generator)


def zero1(model: nn.Module, overlap: bool, name: str = "SGD", **options: Any) -> NeuronZero1Optimizer:
    cls, arguments = OPTIMIZERS[name]
    return NeuronZero1Optimizer(model.parameters(), cls, overlap=overlap, **SMALL, **arguments, **options)


Train = Callable[..., Any]


def steps(model: nn.Module, optimizer: NeuronZero1Optimizer, call: Train | None = None, last: int = STEPS) -> None:
    for step in range(last):
        optimizer.zero_grad()
        (model(rows(step)) if call is None else call(model, step)).backward()
        optimizer.step()


def both(mesh: Mesh, use: Callable[[bool], Any], **options: Any) -> list[Any]:
    """Results of each rank with overlap, after a bitwise comparison with those without."""
    without, with_overlap = (comm.threads.run(mesh, use, overlap, **options) for overlap in (False, True))
    for expected, result in zip(without, with_overlap):
        assert expected.keys() == result.keys()
        for name, value in expected.items():
            assert torch.equal(value, result[name]), name
    return with_overlap


def backward(model: Model, step: int) -> None:
    """The gradients of the synthetic model, through a backward."""
    model.set_gradients(step)
    loss = sum((param * param.grad).sum() for param in model.parameters())
    for param in model.parameters():
        param.grad = None
    loss.backward()

"""A recommendation model (DLRM), arguments of its forward, and the training of modules with tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from neuronx_dist.weights.shard_spec import gather_full, spec_of

__all__ = ["BATCH", "ROWS", "WIDTH", "Dlrm", "inputs", "trained"]

ROWS, WIDTH, BATCH, HOT = [100, 4, 30, 70, 50, 12, 9, 20], 16, 32, 3


class Dlrm(nn.Module):
    """facebookresearch/dlrm's network, by its lines: bags with sparse gradients, products of all pairs, two MLPs."""

    def __init__(self, rows: list[int], width: int) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(count, width, mode="sum", sparse=True) for count in rows])
        self.bot_l = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        features = width + (len(rows) + 1) * len(rows) // 2
        self.top_l = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 1), nn.Sigmoid())
        self.loss_fn = nn.BCELoss()

    def forward(self, dense_x: Tensor, lS_o: list[Tensor], lS_i: list[Tensor], target: Tensor) -> Tensor:
        x = self.bot_l(dense_x)
        ly = [table(indices, offsets) for table, indices, offsets in zip(self.emb_l, lS_i, lS_o, strict=True)]
        (batch_size, d) = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        R = torch.cat([x, Z[:, li, lj]], dim=1)
        return self.loss_fn(self.top_l(R), target)


def inputs(rows: list[int], batch: int, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    return {
        "dense_x": torch.randn(batch, 13, dtype=dtype),
        "lS_o": [torch.arange(0, batch * HOT, HOT) for _ in rows],
        "lS_i": [torch.randint(count, (batch * HOT,)) for count in rows],
        "target": torch.rand(batch, 1, dtype=dtype),
    }


def trained(module: nn.Module, arguments: dict[str, Any], optimizer: Any, steps: int = 3) -> list[Tensor]:
    """Returns losses and gradients of each step, and the weights after them, all whole."""
    found: list[Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(**arguments)
        loss.backward()
        grads = [(x.grad.to_dense(), spec_of(x)) for x in module.parameters() if x.grad is not None]
        found += [loss.detach(), *(gather_full(grad, spec) for grad, spec in grads)]
        optimizer.step()
    return found + [gather_full(x, spec_of(x)) for x in module.parameters()]

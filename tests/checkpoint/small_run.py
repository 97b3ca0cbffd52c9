"""A training run that is small: two linear layers over tp, ZeRO-1 over dp, a scheduler, dropout from two streams."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.spmd.random import streams


class Net(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(8, width, gather_output=False)
        self.down = nxd.RowParallelLinear(width, 8, input_is_parallel=True)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.up(x))
        if self.dropout:
            with streams().fork():
                x = F.dropout(x, self.dropout)
        x = self.down(x)
        return F.dropout(x, self.dropout) if self.dropout else x


class Run:
    """Training that can be saved, with all that is part of it.

    Args:
        width: of the hidden layer.
        seed: of the weights.
        options: of NeuronZero1Optimizer.
    """

    def __init__(
        self, width: int = 16, seed: int = 0, dropout: float = 0.0, zero1: bool = True, **options: Any
    ) -> None:
        self.model, self.zero1 = Net(width, dropout), zero1
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, device="cpu"))
        params, adamw = self.model.parameters(), torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = (
            nxd.NeuronZero1Optimizer(params, adamw, lr=0.01, **options) if zero1 else adamw(params, lr=0.01)
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.step = 0

    def train(self, steps: int = 1) -> list[float]:
        losses = []
        for _ in range(steps):
            generator = torch.Generator().manual_seed(100 * self.step + comm.rank("dp"))
            x = torch.randn(4, 8, generator=generator, device="cpu")
            x = x.to(self.model.up.weight.device)
            loss = self.model(x).square().mean()
            loss.backward()
            nxd.reduce_gradients(self.model, average_over_data=not self.zero1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
            losses.append(float(loss.detach()))
        return losses

    def save(self, folder: Any, tag: str, **options: Any) -> None:
        parts = dict(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)
        nxd.save_checkpoint(folder, tag, **{**parts, "user_content": {"step": self.step}, **options})

    def load(self, folder: Any, tag: str | None = None, **options: Any) -> Any:
        content = nxd.load_checkpoint(folder, tag, self.model, self.optimizer, self.scheduler, **options)
        self.step = content["step"]
        return content

    def values(self) -> list[torch.Tensor]:
        """This rank's weights and optimizer state, as copies."""
        base = getattr(self.optimizer, "base_optimizer", self.optimizer)
        state = [values[name] for values in base.state.values() for name in sorted(values)]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *state)]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))

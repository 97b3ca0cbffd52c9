"""Small models for `spmd.check`, right ones and wrong ones; also what the command line is pointed at."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd

HIDDEN, INNER = 8, 32


class MLP(nn.Module):
    """Column, relu, row, and a loss; `defect` names what is wrong with it."""

    def __init__(self, defect: str = "") -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)
        self.defect = defect

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        defect = getattr(self, f"_{self.defect}", None)
        y = y if defect is None else defect(y)
        return y.square().mean()

    def _missing(self, y: torch.Tensor) -> torch.Tensor:
        if comm.rank("tp") > 0:
            comm.all_reduce(torch.zeros(2), "tp")
        return y

    def _unseen(self, y: torch.Tensor) -> torch.Tensor:
        if [0, 1, 2, 3][comm.rank("tp")] == 2:  # Python reads the digits and does not ask
            comm.all_reduce(torch.zeros(2), "tp")
        return y

    def _order(self, y: torch.Tensor) -> torch.Tensor:
        for op in ("sum", "max") if comm.rank("tp") == 0 else ("max", "sum"):
            comm.all_reduce(torch.zeros(2), "tp", op=op)
        return y

    def _deadlock(self, y: torch.Tensor) -> torch.Tensor:
        for axis in ("tp", "dp") if comm.rank("world") in (0, 5) else ("dp", "tp"):
            comm.all_reduce(torch.zeros(2), axis)
        return y

    def _verb(self, y: torch.Tensor) -> torch.Tensor:
        if comm.rank("tp") == 0:
            comm.all_gather(torch.zeros(2), "tp")
        else:
            comm.all_reduce(torch.zeros(2), "tp")
        return y

    def _op(self, y: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(torch.zeros(2), "tp", op="sum" if comm.rank("tp") == 0 else "max")
        return y

    def _shape(self, y: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(torch.zeros(2 + comm.rank("tp")), "tp")
        return y

    def _dtype(self, y: torch.Tensor) -> torch.Tensor:
        comm.all_reduce(torch.zeros(2, dtype=torch.float64 if comm.rank("tp") else torch.float32), "tp")
        return y

    def _source(self, y: torch.Tensor) -> torch.Tensor:
        comm.broadcast(torch.zeros(2), "tp", src=1 if comm.rank("tp") == 2 else 0)
        return y

    def _send(self, y: torch.Tensor) -> torch.Tensor:
        if comm.rank("tp") == 1:
            comm.send(torch.zeros(2), "tp", dst=0)
        return y

    def _message(self, y: torch.Tensor) -> torch.Tensor:
        if comm.rank("tp") == 1:
            comm.send(torch.zeros(2), "tp", dst=0)
        elif comm.rank("tp") == 0:
            comm.recv(torch.zeros(3), "tp", src=1)
        return y

    def _message_dtype(self, y: torch.Tensor) -> torch.Tensor:
        if comm.rank("tp") == 1:
            comm.send(torch.zeros(2), "tp", dst=0)
        elif comm.rank("tp") == 0:
            comm.recv(torch.zeros(2, dtype=torch.bfloat16), "tp", src=1)
        return y

    def _pairs(self, y: torch.Tensor) -> torch.Tensor:
        comm.permute(torch.zeros(2), "tp", [(0, 1), (1, 2)] if comm.rank("tp") == 2 else [(0, 1), (1, 3)])
        return y

    def _value(self, y: torch.Tensor) -> torch.Tensor:
        return y * y.sum().item()

    def _crash(self, y: torch.Tensor) -> torch.Tensor:
        if comm.rank("dp") == 1:
            raise ZeroDivisionError("only on some ranks")
        return y

    def _allowed(self, y: torch.Tensor) -> torch.Tensor:
        """Uses its rank in ways that are fine."""
        assert 0 <= comm.rank("tp") < comm.size("tp")
        here = spmd.convert(y, "tp", src=spmd.I, dst=spmd.S(1))
        return spmd.all_gather(here, "tp", src=spmd.S(1), dst=spmd.I)

    def _number(self, y: torch.Tensor) -> torch.Tensor:
        return y * (1 + int(comm.rank("tp")))

    def _branch(self, y: torch.Tensor) -> torch.Tensor:
        return y * 2 if comm.rank("tp") == 0 else y

    def _converted(self, y: torch.Tensor) -> torch.Tensor:
        part = spmd.convert(y, "tp", src=spmd.I, dst=spmd.P, expert_mode=True)
        return spmd.all_reduce(part * 2 if comm.rank("tp") == 0 else part, "tp", src=spmd.P, dst=spmd.I)

    def _twice(self, y: torch.Tensor) -> torch.Tensor:
        return spmd.all_reduce(y, "tp", src=spmd.P, dst=spmd.I)

    def _scale(self, y: torch.Tensor) -> torch.Tensor:
        return y / int(comm.size("tp"))  # of a plain number no type tells what it is


def model_fn(defect: str = "") -> nn.Module:
    return MLP(defect)


def example_inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * HIDDEN).view(4, HIDDEN)


def step(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    """A step that forgets to reduce gradients over dp."""
    model(x).backward()
    optimizer.step()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(HIDDEN, INNER, gather_output=False)
        self.down = nxd.RowParallelLinear(INNER, HIDDEN, input_is_parallel=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Four blocks and a squared-error loss."""

    def __init__(self, defect: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.defect = defect

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.defect == "stages" and comm.rank("pp") == 1:
            x = torch.cat([x, x])
            target = torch.cat([target, target])
        for layer in self.layers:
            x = layer(x)
        return (x - target).square().mean()


def pipeline(zero1: bool = False, optimizer: bool = False, defect: str = "", num_microbatches: int = 4) -> Any:
    model = nxd.NxDPPModel(
        Stack(defect),
        transformer_layer_cls=Block,
        num_microbatches=num_microbatches,
        output_loss_value_spec=True,
        input_names=["x", "target"],
        auto_partition=True,
        use_zero1_optimizer=zero1,
    )
    if not optimizer:
        return model
    wrapper = nxd.NeuronZero1Optimizer if zero1 else nxd.MasterWeightsOptimizer
    return model, wrapper(list(model.local_parameters()), torch.optim.AdamW, lr=1e-3)


def pipeline_inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(8, HIDDEN), "target": torch.zeros(8, HIDDEN)}

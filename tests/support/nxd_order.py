"""Training as scripts for NxD write it: `run_train`, then the optimizer wrapper's reductions in NxD's order.

`NxDOptimizer.step` takes the mean over cp, then the sum of sequence-parallel gradients over tp, then (without ZeRO-1)
the mean over the data in buckets, clips, and steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.parallel_layers import grads, layer_norm, mappings

__all__ = ["MAX_NORM", "batch", "build", "build_model", "make_optimizer", "own_rows", "step"]

ROWS, SEQ, HIDDEN = 8, 4, 6
MAX_NORM = 0.05


class Block(nn.Module):
    """A sequence-parallel MLP `[batch, seq/tp, HIDDEN]`: the gradients of its norm are partial over tp."""

    def __init__(self) -> None:
        super().__init__()
        split: dict[str, Any] = dict(sequence_parallel_enabled=True, sequence_dimension=1, dtype=torch.float64)
        self.norm = layer_norm.LayerNorm(HIDDEN, sequence_parallel_enabled=True, dtype=torch.float64)
        self.up = nxd.ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **split)
        self.down = nxd.RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **split)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """Two blocks and the mean of squared errors, of whole sequences `[batch, seq, HIDDEN]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = mappings.scatter_to_sequence_parallel_region(x, 1)
        for layer in self.layers:
            x = layer(x)
        x = mappings.gather_from_sequence_parallel_region(x, 1, to_model_parallel=False)
        return (x - target).square().mean()


def build_model(wrapper: str, num_microbatches: int = 2) -> Any:
    """A pipeline model on meta.

    Args:
        wrapper: the option that leaves the mean over the data to the optimizer; "" for none.
    """
    with torch.device("meta"):
        module = Stack()
    return nxd.NxDPPModel(
        module,
        transformer_layer_cls=Block,
        num_microbatches=num_microbatches,
        output_loss_value_spec=True,
        input_names=["x", "target"],
        auto_partition=True,
        broadcast_and_average_loss=True,
        **({wrapper: True} if wrapper else {}),
    )


def make_optimizer(model: Any) -> Any:
    """SGD, in ZeRO-1 if the model leaves the mean over the data to that."""
    params = list(model.local_parameters())
    if model.use_zero1_optimizer:
        return nxd.NeuronZero1Optimizer(params, torch.optim.SGD, lr=1.0, max_norm=MAX_NORM)
    return torch.optim.SGD(params, lr=1.0)


def build(wrapper: str) -> tuple[Any, Any]:
    """Model and optimizer on meta, for a check."""
    model = build_model(wrapper)
    return model, make_optimizer(model)


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    """The whole global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    x, target = (torch.randn(ROWS, SEQ, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"x": x, "target": target}


def own_rows(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's rows; the ranks of cp have rows of their own here, as those of dp."""
    return {name: value.chunk(comm.size(("dp", "cp")))[comm.rank(("dp", "cp"))] for name, value in inputs.items()}


def step(model: Any, optimizer: Any, inputs: dict[str, torch.Tensor], twice: str = "") -> torch.Tensor:
    """A step in NxD's order; `twice` is a reduction that a user's script does a second time: "cp", "tp" or "data"."""
    loss: torch.Tensor = model.run_train(**inputs)
    for _ in range(2 if twice == "cp" else 1):
        grads.allreduce_context_parallel_gradients(optimizer)
    for _ in range(2 if twice == "tp" else 1):
        grads.allreduce_sequence_parallel_gradients(optimizer)
    if not isinstance(optimizer, nxd.NeuronZero1Optimizer):
        for _ in range(2 if twice == "data" else 1):
            grads.bucket_allreduce_gradients([param.grad for param in model.local_parameters()])
        grads.clip_grad_norm(list(model.local_parameters()), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss

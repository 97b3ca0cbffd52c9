"""The MLPs of this rank's experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...spmd import ShardedModule
from .moe_parallel_layers import ExpertFusedColumnParallelLinear, ExpertFusedRowParallelLinear

__all__ = ["Experts"]


class Experts(ShardedModule):
    """`down(act(gate) * up)` of each expert, or without `glu` `down(act(up))`.

    Args:
        num_experts: of all ranks.
        activation_fn: of the gate.
        init_method, output_layer_init_method: fill one expert's matrix `[in, out]`, of gate and up, and of down.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        glu: bool,
        activation_fn: Callable[[torch.Tensor], torch.Tensor],
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        bias: bool = False,
        input_layer_init_method: Any = None,
        output_layer_init_method: Any = None,
    ) -> None:
        super().__init__()
        self.glu, self.activation_fn = glu, activation_fn
        options: dict[str, Any] = dict(bias=bias, dtype=dtype, device=device)
        blocks = 2 if glu else 1
        up = ExpertFusedColumnParallelLinear(
            num_experts,
            hidden_size,
            blocks * intermediate_size,
            stride=blocks,
            init_method=input_layer_init_method,
            **options,
        )
        self.add_module("gate_up_proj" if glu else "up_proj", up)
        self.down_proj = ExpertFusedRowParallelLinear(
            num_experts, intermediate_size, hidden_size, init_method=output_layer_init_method, **options
        )

    def forward(self, hidden_states: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """`[rows, h]`, in order of experts, `sizes` of each, to partial sums of the same shape."""
        inner: torch.Tensor = self.get_submodule("gate_up_proj" if self.glu else "up_proj")(hidden_states, sizes)
        if self.glu:
            gate, up = inner.chunk(2, -1)
            inner = self.activation_fn(gate) * up
        else:
            inner = self.activation_fn(inner)
        output: torch.Tensor = self.down_proj(inner, sizes)
        return output

"""An MLP that every token goes through, beside its experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...parallel_layers.linear import ColumnParallelLinear, RowParallelLinear
from .expert_mlps import activation_of

__all__ = ["SharedExperts"]


class SharedExperts(nn.Module):
    """`down(act(gate) * up)`, of `num_shared_experts * intermediate_size` features, sharded over tp.

    Inside of `MoE`, which sums its output with that of the experts: input R, output partial over tp.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_shared_experts: int,
        hidden_act: str,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        size = num_shared_experts * intermediate_size
        options: dict[str, Any] = dict(bias=False, dtype=dtype, device=device)
        columns: dict[str, Any] = dict(gather_output=False, input_is_replicated=True, **options)
        self.gate_proj = ColumnParallelLinear(hidden_size, size, **columns)
        self.up_proj = ColumnParallelLinear(hidden_size, size, **columns)
        self.down_proj = RowParallelLinear(size, hidden_size, input_is_parallel=True, reduce_output=False, **options)
        self.act_fn = activation_of("SharedExperts", hidden_act)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[.., h] -> [.., h]`, partial over tp."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))

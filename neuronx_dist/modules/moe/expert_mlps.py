"""The experts of all ranks, as a function of tokens and their routes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...spmd import ShardedModule
from .dispatch import route_of
from .experts import Experts

__all__ = ["ACT2FN", "ExpertMLPs"]

ACT2FN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
}


class ExpertMLPs(ShardedModule):
    """MLPs of experts, `num_experts / ep` of them on this rank, each sharded over tp.

    Args:
        num_experts: of all ranks; ep divides it.
        top_k: experts of each token.
        hidden_size, intermediate_size: of one expert, on all tp ranks.
        hidden_act: name of the activation, of `ACT2FN`.
        glu_mlp: the activation gates a second product: `down(act(gate) * up)`.
        capacity_factor: c > 0: an expert takes at most `ceil(tokens * top_k * c / num_experts)` tokens of each data
            rank, in order; further ones are dropped, and get 0 from it. None or at most 0: no token is dropped.
        normalize_top_k_affinities: the weights of a token's experts sum to 1.
        init_method, output_layer_init_method: fill the matrix `[in, out]` of one expert in place.

    Raises:
        ValueError: ep does not divide the experts, tp not `intermediate_size`; an unknown activation.
    """

    recorded_as_one_call = True  # in a pipeline: a recording's sizes are those of every batch

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        glu_mlp: bool,
        capacity_factor: float | None,
        sequence_parallel_enabled: bool = False,
        block_size: int | None = None,
        normalize_top_k_affinities: bool = False,
        bias: bool = False,
        *,
        init_method: Callable[[torch.Tensor], Any] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], Any] | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
    ) -> None:
        super().__init__()
        if hidden_act not in ACT2FN:
            raise ValueError(f"ExpertMLPs: hidden_act={hidden_act!r} is not one of {', '.join(ACT2FN)}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"ExpertMLPs: top_k={top_k} must be from 1 to num_experts={num_experts}")
        self.num_experts, self.top_k, self.capacity_factor = num_experts, top_k, capacity_factor
        self.normalize_top_k_affinities = normalize_top_k_affinities
        self.mlp_op = Experts(
            num_experts,
            hidden_size,
            intermediate_size,
            glu_mlp,
            ACT2FN[hidden_act],
            dtype,
            device,
            bias,
            init_method,
            output_layer_init_method,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        expert_affinities: torch.Tensor,
        expert_index: torch.Tensor,
        seq_len: int | None = None,
    ) -> torch.Tensor:
        """Returns the weighted sum of each token's experts, `[tokens, h]`, partial over tp; all ranks of ep call it.

        Args:
            hidden_states: `[tokens, h]`, equal on all tp ranks, whose gradients are partial over tp (R).
            expert_affinities: of each token to each expert, `[tokens, num_experts]`, as `hidden_states` over tp.
            expert_index: the experts of each token, `[tokens, k]`.
            seq_len: accepted for NxD's scripts.
        """
        weights = expert_affinities.gather(1, expert_index)
        if self.normalize_top_k_affinities:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        weights = weights.to(hidden_states.dtype)
        count, capacity = len(hidden_states), None
        if self.capacity_factor is not None and self.capacity_factor > 0:
            capacity = min(count, math.ceil(count * self.top_k * self.capacity_factor / self.num_experts))
        route = route_of(expert_index, self.num_experts, hidden_states, capacity)
        return route.to_tokens(self.mlp_op(route.to_experts(hidden_states), route.sizes), weights)

"""The experts of all ranks, as a function of tokens and their routes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ...parallel_layers.autograd_linear import cast_if_autocast_enabled
from ...spmd import ShardedModule
from .dispatch import Dispatch, route_of
from .experts import Experts

__all__ = ["ACT2FN", "ExpertMLPs", "activation_of"]

#: Activations by their names in Hugging Face's configs.
ACT2FN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
}


def activation_of(layer: str, hidden_act: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the activation of a name.

    Raises:
        ValueError: the name is not in `ACT2FN`; the message begins with the layer's name.
    """
    if hidden_act not in ACT2FN:
        raise ValueError(f"{layer}: hidden_act={hidden_act!r} is not one of {', '.join(ACT2FN)}")
    return ACT2FN[hidden_act]


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
        activation = activation_of("ExpertMLPs", hidden_act)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"ExpertMLPs: top_k={top_k} must be from 1 to num_experts={num_experts}")
        self.num_experts, self.top_k, self.capacity_factor = num_experts, top_k, capacity_factor
        self.hidden_size, self.normalize_top_k_affinities = hidden_size, normalize_top_k_affinities
        self.mlp_op = Experts(
            num_experts,
            hidden_size,
            intermediate_size,
            glu_mlp,
            activation,
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
        *,
        beside: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Returns the weighted sum of each token's experts, `[tokens, h]`, partial over tp; all ranks of ep call it.

        Args:
            hidden_states: `[tokens, h]`, equal on all tp ranks, whose gradients are partial over tp (R).
            expert_affinities: of each token to each expert, `[tokens, num_experts]`, as `hidden_states` over tp.
            expert_index: the experts of each token, `[tokens, k]`.
            seq_len: accepted for NxD's scripts.
            beside: computes `[tokens, h]`, which is added, while tokens travel to the ranks of their experts.

        Under autocast rows are exchanged and returned in its dtype.

        Raises:
            ValueError: a shape is another.
        """
        self._refuse_shapes(hidden_states, expert_affinities, expert_index)
        (hidden_states,) = cast_if_autocast_enabled(hidden_states)  # type: ignore[assignment]
        weights = expert_affinities.gather(1, expert_index)
        if self.normalize_top_k_affinities:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
        weights = weights.to(hidden_states.dtype)
        count, capacity = len(hidden_states), None
        if self.capacity_factor is not None and self.capacity_factor > 0:
            capacity = min(count, math.ceil(count * self.top_k * self.capacity_factor / self.num_experts))
        route = route_of(expert_index, self.num_experts, hidden_states, capacity)
        if beside is not None and isinstance(route, Dispatch):
            rows, more = route.to_experts_beside(hidden_states, beside)
            return route.to_tokens(self.mlp_op(rows, route.sizes), weights) + more
        out = route.to_tokens(self.mlp_op(route.to_experts(hidden_states), route.sizes), weights)
        return out if beside is None else out + beside()

    def _refuse_shapes(self, tokens: torch.Tensor, affinities: torch.Tensor, expert_index: torch.Tensor) -> None:
        if tokens.dim() != 2:
            raise ValueError(
                f"ExpertMLPs: hidden_states {list(tokens.shape)} must be [tokens, {self.hidden_size}]: pass "
                "hidden_states.flatten(0, -2), and restore their shape after"
            )
        if tokens.shape[1] != self.hidden_size:
            raise ValueError(
                f"ExpertMLPs: hidden_states {list(tokens.shape)} have {tokens.shape[1]} features, not "
                f"hidden_size={self.hidden_size}: pass all features, or build the experts with their number"
            )
        for name, tensor, size_name in (
            ("expert_affinities", affinities, "num_experts"),
            ("expert_index", expert_index, "top_k"),
        ):
            size = getattr(self, size_name)
            if tensor.shape != (len(tokens), size):
                raise ValueError(
                    f"ExpertMLPs: {name} {list(tensor.shape)} must be [tokens, {size_name}], [{len(tokens)}, {size}] "
                    f"here: pass the router's, built with {size_name}={size}"
                )

"""A layer of experts: router, experts and shared experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import has_torch_function_unary

from ... import comm, spmd
from ...comm.verbs.transformed_tensors import transforming
from ...parallel_layers.model_groups import initialize_token_shuffle_group
from ...spmd import I, P, R, S
from .expert_mlps import ExpertMLPs
from .routing import RouterBase
from .token_shuffling import token_shuffle, token_unshuffle

__all__ = ["MoE"]


class MoE(nn.Module):
    """Sends each token through the experts that a router chooses: NxD's layer.

    One collective of tp each way: tokens come whole (or are gathered, under sequence parallelism), the experts of this
    rank's features give partial sums, and their sum over tp is taken once, after experts and shared experts are added.

    Args:
        router: returns `(logits, affinities, expert_index)`.
        expert_mlps: takes tokens, affinities and expert_index.
        shared_experts: an MLP for every token, partial over tp (`SharedExperts`), added to the experts' sum.
        rmsnorm: applied to the input first.
        sequence_parallel_enabled: input and output are sharded along `sequence_dimension` (0 by default).
        return_router_logits: also return the logits, `[tokens, experts]`, for auxiliary losses.
        return_expert_index: also return the experts of each token, `[tokens, k]`.
        token_shuffle_group_size: data ranks that exchange tokens before the router; 1: none.
        token_shuffle_seed: of the permutation; None: the random state, which is to be equal on tp ranks.
    """

    def __init__(
        self,
        router: RouterBase,
        expert_mlps: ExpertMLPs,
        shared_experts: nn.Module | None = None,
        rmsnorm: nn.Module | None = None,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        return_router_logits: bool = False,
        return_expert_index: bool = False,
        token_shuffle_group_size: int = 1,
        token_shuffle_seed: int | None = None,
    ) -> None:
        super().__init__()
        for name in ("num_experts", "top_k"):
            counts = getattr(router, name), getattr(expert_mlps, name)
            if counts[0] != counts[1]:
                raise ValueError(f"MoE: {name} is {counts[0]} in the router, and {counts[1]} in the experts")
        self.router, self.expert_mlps, self.shared_experts = router, expert_mlps, shared_experts
        self.rmsnorm = rmsnorm
        self.sequence_parallel_enabled, self.sequence_dimension = sequence_parallel_enabled, sequence_dimension or 0
        self.return_router_logits, self.return_expert_index = return_router_logits, return_expert_index
        self.token_shuffle_group_size, self.token_shuffle_seed = token_shuffle_group_size, token_shuffle_seed
        if token_shuffle_group_size > 1:
            initialize_token_shuffle_group(token_shuffle_group_size)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`[.., h] -> ([.., h],)`, and the router's logits and the experts if they are asked for.

        All ranks of ep call it together, with any numbers of tokens.
        """
        if self.rmsnorm is not None:
            hidden_states = self.rmsnorm(hidden_states)
        shuffles = self.token_shuffle_group_size > 1
        if self.sequence_parallel_enabled:
            hidden_states = spmd.all_gather(hidden_states, "tp", src=S(self.sequence_dimension), dst=R)
        shape = hidden_states.shape
        tokens = hidden_states.flatten(0, -2)
        if shuffles:
            tokens, permutation = token_shuffle(tokens, self.token_shuffle_seed)
        if self.sequence_parallel_enabled:  # the gradient of the router's input, which all ranks compute, counts once
            routed = spmd.convert(tokens, "tp", src=R, dst=I, expert_mode=True)
        else:
            tokens, routed = spmd.convert(tokens, "tp", src=I, dst=R), tokens
        logits, affinities, index = self.router(routed)
        affinities = spmd.convert(affinities, "tp", src=I, dst=R)
        if self.shared_experts is None:
            out = self.expert_mlps(tokens, affinities, index)
        elif _may_overlap(tokens):
            out = self.expert_mlps(tokens, affinities, index, beside=partial(self.shared_experts, tokens))
        else:
            out = self.expert_mlps(tokens, affinities, index) + self.shared_experts(tokens)
        if shuffles:
            out = token_unshuffle(out, permutation)
        out = out.unflatten(0, shape[:-1])
        if self.sequence_parallel_enabled:
            out = spmd.reduce_scatter(out, "tp", src=P, dst=S(self.sequence_dimension))
        else:
            out = spmd.all_reduce(out, "tp", src=P, dst=I)
        more: list[Any] = [logits] * self.return_router_logits + [index] * self.return_expert_index
        return (out, *more)


def _may_overlap(tokens: torch.Tensor) -> bool:
    """Returns whether shared experts can run while tokens travel: ordinary tensors, over several ranks of ep.

    Recordings (pipelines, checks) contain experts and shared experts as two calls.
    """
    return comm.size("ep") > 1 and not (has_torch_function_unary(tokens) or transforming())

"""Routers: the experts of each token, and its affinity to each of them. Every tp rank computes the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ... import comm
from ...gradients.gradient import DATA_AXES

__all__ = ["GroupLimitedRouter", "RouterBase", "RouterSinkhorn", "RouterTopK"]

Routes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RouterBase(nn.Module):
    """A linear layer to one logit for each expert, and an activation.

    `sequence_parallel_enabled` and `sequence_dimension` are accepted for NxD's scripts: `MoE` gathers the sequence,
    once for the router and the experts. So is `tensor_model_parallel_group`.

    Args:
        act_fn: "softmax" or "sigmoid", in float32 at least.
        jitter_eps: in training logits are computed of the input times random numbers from 1 - eps to 1 + eps.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "softmax",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        bias: bool = False,
        tensor_model_parallel_group: Any = None,
        jitter_eps: float = 0.0,
    ) -> None:
        super().__init__()
        if act_fn not in ("softmax", "sigmoid"):
            raise ValueError(f"{type(self).__name__}: act_fn={act_fn!r} is neither 'softmax' nor 'sigmoid'")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"{type(self).__name__}: top_k={top_k} must be from 1 to num_experts={num_experts}")
        self.num_experts, self.top_k, self.hidden_size = num_experts, top_k, hidden_size
        self.act_fn, self.jitter_eps = act_fn, jitter_eps
        self.linear_router = nn.Linear(hidden_size, num_experts, bias=bias, dtype=dtype, device=device)

    def get_router_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[.., h] -> [tokens, experts]`.

        Raises:
            ValueError: h is not `hidden_size`.
        """
        if hidden_states.shape[-1] != self.hidden_size:
            raise ValueError(
                f"{type(self).__name__}: the input {list(hidden_states.shape)} has {hidden_states.shape[-1]} features, "
                f"not hidden_size={self.hidden_size}: pass all features, or build the router with their number"
            )
        tokens = hidden_states.flatten(0, -2)
        if self.training and self.jitter_eps:
            tokens = tokens * torch.empty_like(tokens).uniform_(1 - self.jitter_eps, 1 + self.jitter_eps)
        return self.linear_router(tokens.to(self.linear_router.weight.dtype))

    def apply_activation_fn(self, logits: torch.Tensor) -> torch.Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide.softmax(-1) if self.act_fn == "softmax" else wide.sigmoid()


class RouterTopK(RouterBase):
    """The k experts with the largest affinities.

    Args:
        apply_act_fn_over_topk: the activation is of the k largest logits alone; other affinities are 0.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        bias: bool = False,
        tensor_model_parallel_group: Any = None,
        act_fn: str = "softmax",
        apply_act_fn_over_topk: bool = False,
        jitter_eps: float = 0.0,
    ) -> None:
        super().__init__(
            num_experts, top_k, hidden_size, act_fn, dtype=dtype, device=device, bias=bias, jitter_eps=jitter_eps
        )
        self.apply_act_fn_over_topk = apply_act_fn_over_topk

    def forward(self, hidden_states: torch.Tensor) -> Routes:
        """Returns logits and affinities, `[tokens, experts]`, and the numbers of the experts, `[tokens, k]`."""
        logits = self.get_router_logits(hidden_states)
        top, index = logits.topk(self.top_k, dim=-1)
        if self.apply_act_fn_over_topk:
            top = self.apply_activation_fn(top)
            affinities = torch.zeros_like(logits, dtype=top.dtype).scatter(1, index, top)
        else:
            affinities = self.apply_activation_fn(logits)
        return logits, affinities, index


class RouterSinkhorn(RouterBase):
    """One expert for each token, chosen in training from logits that Sinkhorn's algorithm balances.

    The tokens of this rank are balanced, as in NxD (Megatron's router; Clark et al., arXiv:2202.01169).

    Args:
        sinkhorn_iterations: None: 30; `sinkhorn_tol` ends them earlier where the scale of rows no longer changes.

    Raises:
        ValueError: `top_k` is not 1.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        act_fn: str = "sigmoid",
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        sinkhorn_iterations: int | None = None,
        sinkhorn_tol: float | None = None,
    ) -> None:
        if top_k != 1:
            raise ValueError(f"RouterSinkhorn: top_k={top_k}, and Sinkhorn's algorithm gives one expert: pass top_k=1")
        super().__init__(num_experts, top_k, hidden_size, act_fn, dtype=dtype, device=device)
        self.sinkhorn_iterations, self.sinkhorn_tol = sinkhorn_iterations or 30, sinkhorn_tol

    def forward(self, hidden_states: torch.Tensor) -> Routes:
        """Returns logits and affinities, `[tokens, experts]`, and the numbers of the experts, `[tokens, 1]`."""
        logits = self.get_router_logits(hidden_states)
        with torch.no_grad():
            choice = self._sinkhorn(logits) if self.training else logits
            index = choice.topk(1, dim=-1)[1]
        return logits, self.apply_activation_fn(logits), index

    def _sinkhorn(self, logits: torch.Tensor) -> torch.Tensor:
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        # A row's scale changes no result: columns begin with ones, and the first scale of rows divides by it.
        cost = (wide - wide.amax(1, keepdim=True)).exp()
        row_sum = 1 / (cost.shape[0] or 1)  # a rank may have no tokens
        rows, columns = cost.new_ones(cost.shape[0]), cost.new_ones(cost.shape[1])
        for _ in range(self.sinkhorn_iterations):
            before = columns
            rows = row_sum / ((columns * cost).sum(1) + 1e-8)
            columns = 1 / cost.shape[1] / ((rows.unsqueeze(1) * cost).sum(0) + 1e-8)
            if self.sinkhorn_tol is not None and bool((before - columns).abs().mean() <= self.sinkhorn_tol):
                break
        return columns * cost * rows.unsqueeze(1)


class GroupLimitedRouter(RouterBase):
    """DeepSeek-V3's router: experts of the best `topk_group` of `n_group` groups, by affinities plus a bias.

    The bias `e_score_correction_bias` (a buffer) chooses experts and does not weigh them; `update_bias` moves it.

    Args:
        n_group: groups of equal size; a group counts for the sum of its two largest biased affinities.
        topk_group: groups of which experts are taken.

    Raises:
        ValueError: groups of unequal size, or `topk_group` of them have fewer than `top_k` experts.
    """

    e_score_correction_bias: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        n_group: int,
        topk_group: int,
        sequence_parallel_enabled: bool = False,
        sequence_dimension: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        tensor_model_parallel_group: Any = None,
        jitter_eps: float = 0.0,
    ) -> None:
        super().__init__(num_experts, top_k, hidden_size, "sigmoid", dtype=dtype, device=device, jitter_eps=jitter_eps)
        if not 1 <= topk_group <= n_group or num_experts % n_group:
            raise ValueError(
                f"GroupLimitedRouter: n_group={n_group} must divide num_experts={num_experts}, and "
                f"topk_group={topk_group} lie between 1 and n_group"
            )
        allowed = topk_group * (num_experts // n_group)
        if top_k > allowed:
            raise ValueError(
                f"GroupLimitedRouter: top_k={top_k} is more than the {allowed} experts of topk_group={topk_group} "
                f"groups of {num_experts // n_group} (num_experts={num_experts}, n_group={n_group}): choose top_k of "
                f"at most {allowed}, or a larger topk_group"
            )
        self.n_group, self.topk_group = n_group, topk_group
        wide = torch.promote_types(dtype, torch.float32)
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts, dtype=wide, device=device))

    def forward(self, hidden_states: torch.Tensor) -> Routes:
        """Returns logits and affinities, `[tokens, experts]`, and the numbers of the experts, `[tokens, k]`."""
        logits = self.get_router_logits(hidden_states)
        affinities = self.apply_activation_fn(logits)
        with torch.no_grad():
            scores = (affinities + self.e_score_correction_bias).unflatten(1, (self.n_group, -1))
            groups = scores.topk(min(2, scores.shape[-1]), dim=-1)[0].sum(-1).topk(self.topk_group, dim=-1)[1]
            allowed = F.one_hot(groups, self.n_group).sum(1).bool().unsqueeze(-1)
            index = scores.masked_fill(~allowed, -torch.inf).flatten(1).topk(self.top_k, dim=-1)[1]
        return logits, affinities, index

    @torch.no_grad()
    def update_bias(self, expert_index: torch.Tensor, rate: float = 1e-3) -> None:
        """Moves the bias by `rate` towards experts with fewer tokens than the mean, after a step; dp x cp call it.

        (Wang et al., arXiv:2408.15664.) Counts are those of all data ranks, so that they keep one bias.

        Args:
            expert_index: the experts of this rank's tokens in the step, `[tokens, k]`.
        """
        counts = torch.bincount(expert_index.flatten(), minlength=self.num_experts)
        counts = comm.all_reduce(counts, DATA_AXES).to(self.e_score_correction_bias.dtype)
        self.e_score_correction_bias += rate * (counts.mean() - counts).sign()

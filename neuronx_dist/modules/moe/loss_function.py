"""Auxiliary losses of routing, over the tokens of all data ranks: equal to those of one process with all tokens.

Their value is the same on every rank. The gradient of a rank's logits is that of its tokens times dp x cp, which the
mean of gradients over dp x cp divides out. Under pipelines and accumulation a loss is of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ... import spmd
from ...gradients.gradient import DATA_AXES
from ...spmd import P, R

__all__ = ["load_balancing_loss_func", "router_z_loss_func"]

Logits = torch.Tensor | Sequence[torch.Tensor]


def load_balancing_loss_func(
    router_logits: Logits, num_experts: int, top_k: int, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The Switch Transformer's loss (Fedus et al., arXiv:2101.03961, eq. 4-6): `E * sum_e f_e * p_e`.

    f_e is the number of choices of expert e for each token, p_e the mean of its probability. All ranks of dp x cp call
    it, with any numbers of tokens.

    Args:
        router_logits: `[tokens, experts]`; or those of several layers, whose tokens count together.
        attention_mask: `[batch, seq]`, 0 for tokens that do not count, of each layer.

    Returns:
        0-dim tensor, in float32 at least.
    """
    layers = [router_logits] if isinstance(router_logits, torch.Tensor) else [*router_logits]
    logits = torch.cat([layer.flatten(0, -2) for layer in layers])
    probabilities = _wide(logits).softmax(-1)
    with torch.no_grad():
        chosen = F.one_hot(probabilities.topk(top_k, dim=-1)[1], num_experts).sum(1).to(probabilities.dtype)
    if attention_mask is None:
        weights = torch.ones_like(probabilities[:, :1])
    else:
        weights = attention_mask.reshape(-1, 1).to(probabilities.dtype).repeat(len(layers), 1)
    counts = spmd.all_reduce(torch.cat([(chosen * weights).sum(0), weights.sum(0)]), DATA_AXES, src=P, dst=R)
    means = spmd.all_reduce((probabilities * weights).sum(0), DATA_AXES, src=P, dst=R) / counts[-1].clamp_min(1)
    return num_experts * (counts[:-1] / counts[-1].clamp_min(1) * means).sum()


def router_z_loss_func(router_logits: Logits) -> torch.Tensor:
    """The mean of `logsumexp(logits) ** 2` over the tokens of all data ranks (Zoph et al., arXiv:2202.08906, eq. 5)."""
    layers = [router_logits] if isinstance(router_logits, torch.Tensor) else [*router_logits]
    logits = _wide(torch.cat([layer.flatten(0, -2) for layer in layers]))
    squares = logits.logsumexp(-1).square()
    count = spmd.all_reduce(torch.ones_like(squares).sum(), DATA_AXES, src=P, dst=R)
    return spmd.all_reduce(squares.sum(), DATA_AXES, src=P, dst=R) / count


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

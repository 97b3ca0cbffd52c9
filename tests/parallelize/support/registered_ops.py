"""Functions that are registered with an annotation, at the top level of a module, as emitted files import them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from neuronx_dist.parallelize.annotations.register import register_op


@register_op("* k+, n k+ -> * n")
def scaled_linear(x: torch.Tensor, w: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    return scale * (x @ w.t())


@register_op("b s^ (heads d^), b t^ (heads d^), b t^ (heads d^) -> b s^ (heads d^)")
def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int) -> torch.Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * grad * x**2


register_op("* -> *", "cubed")(Cubed)


def paths() -> tuple[list[torch.Tensor], dict[str, Any]]:
    """4 samples of 6 steps and 5 words, with targets of 1 to 3 words."""
    log_probs = torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(0)).double().log_softmax(-1)
    targets = torch.arange(12).reshape(4, 3) % 4 + 1
    return [log_probs, targets, torch.tensor([6, 5, 6, 4]), torch.tensor([3, 1, 2, 1])], {}


@register_op("t^ n c^, n s^, n, n -> n", example=paths)
def ctc_losses(
    log_probs: torch.Tensor, targets: torch.Tensor, steps: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    return F.ctc_loss(log_probs, targets, steps, lengths, reduction="none")


def _routed() -> tuple[list[torch.Tensor], dict[str, Any]]:
    """6 tokens of width 4, each to 2 of 3 experts of width 8."""
    generator = torch.Generator().manual_seed(0)
    tokens, gate_up, down = (torch.randn(s, generator=generator).double() for s in ((6, 4), (3, 16, 4), (3, 4, 8)))
    weights, chosen = torch.rand(6, 3, generator=generator).double().topk(2)
    return [tokens, chosen, weights, gate_up, down], {}


@register_op("t h^, t k^, t k^, e^ (2 i+) h^, e^ h^ i+ -> t h^", example=_routed)
def experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The sum of the chosen experts' results for each token, weighted: which of them have tokens is in the values."""
    total = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, position = torch.where(chosen == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        result = F.linear(F.silu(gate) * up, down[expert]) * weights[token, position, None]
        total = total.index_add(0, token, result.to(total.dtype))
    return total

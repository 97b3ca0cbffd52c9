"""Functions that are registered with an annotation, at the top level of a module, as emitted files import them."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from neuronx_dist.parallelize.register import register_op


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

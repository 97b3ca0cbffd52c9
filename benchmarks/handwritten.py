"""Hand-written autograd functions of the linear layers: Megatron's f and g, straight on torch.distributed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

__all__ = ["Column", "Row"]


class Column(torch.autograd.Function):
    """One input-gradient collective for all weights, in place, while the weight gradients are computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> Any:
        ctx.save_for_backward(x, *weights)
        outputs = tuple(F.linear(x, weight) for weight in weights)
        return outputs[0] if len(weights) == 1 else outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        flat = [grad.view(-1, grad.shape[-1]) for grad in grads]
        grad_x = flat[0].mm(weights[0])
        for grad, weight in zip(flat[1:], weights[1:]):
            grad_x.addmm_(grad, weight)
        reducing = dist.all_reduce(grad_x, async_op=True)
        flat_x = x.view(-1, x.shape[-1])
        grad_weights = [grad.t().mm(flat_x) for grad in flat]
        reducing.wait()
        return grad_x.view_as(x), *grad_weights


class Row(torch.autograd.Function):
    """The output is summed in place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = F.linear(x, weight)
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = grad.view(-1, grad.shape[-1])
        return flat.mm(weight).view_as(x), flat.t().mm(x.view(-1, x.shape[-1]))

"""Forwards whose backward is divided, and their gradients of a whole backward and of two halves."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from neuronx_dist.pipeline.run.halves import WeightHalf, divide
from neuronx_dist.pipeline.run.recomputation import seen_checkpoints
from tests.support.counting import Flops

__all__ = [
    "Asked",
    "Both",
    "FORWARDS",
    "ROWS",
    "SIZE",
    "Module",
    "Pair",
    "Twice",
    "in_halves",
    "same",
    "tensors",
    "whole",
]

SIZE, ROWS = 6, 4


class Both(torch.autograd.Function):
    """`x @ w`, whose backward computes both gradients whatever it is asked for."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, name: str = "") -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        Both.calls += 1
        x, w = ctx.saved_tensors
        return grad @ w.t(), x.t() @ grad, None


class Asked(Both):
    """The same, computing what it is asked for."""

    splits_backward = True

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        need_x, need_w, _ = ctx.needs_input_grad
        return grad @ w.t() if need_x else None, x.t() @ grad if need_w else None, None


class Pair(torch.autograd.Function):
    """Two products of one input; an output without a gradient counts as zeros."""

    splits_backward = True

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> Any:
        ctx.save_for_backward(a, x, b)
        return x @ a, x @ b

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> Any:
        a, x, b = ctx.saved_tensors
        need_a, need_x, need_b = ctx.needs_input_grad
        grad_x = first @ a.t() + second @ b.t() if need_x else None
        return x.t() @ first if need_a else None, grad_x, x.t() @ second if need_b else None


class NoZeros(Pair):
    """An output without a gradient has None, or zeros in the second half."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return Pair.forward(ctx, a, x, b)

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor) -> Any:
        assert first is None or (not first.any() and not ctx.needs_input_grad[1])
        return Pair.backward(ctx, torch.zeros_like(second) if first is None else first, second)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE)
        self.second = nn.Linear(SIZE, SIZE, bias=False)
        self.norm = nn.LayerNorm(SIZE)
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.bias = nn.Parameter(torch.randn(SIZE))
        self.frequencies = nn.Parameter(torch.linspace(0, 1, SIZE, dtype=torch.complex128))

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(F.gelu(self.first(self.norm(x))))

    def used_twice(self, x: torch.Tensor) -> torch.Tensor:
        """In a row, three times: a gradient goes through the later uses to the first."""
        return self.first(torch.tanh(self.first(torch.tanh(self.first(x)))))

    def side_by_side(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.first(x + 1) + self.first(x).sigmoid()

    def derived_weight(self, x: torch.Tensor) -> torch.Tensor:
        """A weight and a bias that are computed of parameters; the weight is used twice."""
        weight = self.weight / self.weight.norm()
        return F.linear(F.linear(x, weight, self.bias * 2), weight) + self.bias

    def in_place(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y[:, 0] = self.bias[0] * 2
        y[1:].mul_(self.bias)
        return y.relu_() + x

    def views(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.first(x).chunk(2, dim=1)
        return torch.cat([right.t().reshape(ROWS, -1), left * self.bias[:3]], dim=1)

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.dropout(self.first(x), 0.5))

    def without_grad(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.first(x).abs().mean()
        return self.second(x) / scale

    def no_parameters(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).softmax(-1)

    def frozen(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.detach(), self.bias)

    def itself(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def not_of_x(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x.detach())

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (F.linear(x, w).unsqueeze(0) for w in (self.weight, self.first.weight, self.second.weight))
        return F.scaled_dot_product_attention(q, k, v).squeeze(0)

    def conv(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv1d(x.unsqueeze(1), self.weight[:1, None, :3], self.bias[:1], padding=1).squeeze(1)

    def computes_both(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Both.apply(self.first(x), self.weight * 2, "name"))

    def asks(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Asked.apply(self.first(x), self.weight, "name"))

    def pair(self, x: torch.Tensor) -> torch.Tensor:
        first, second = Pair.apply(self.weight, self.first(x), self.second.weight)
        return first * second

    def half_a_pair(self, x: torch.Tensor) -> torch.Tensor:
        return Pair.apply(self.weight, self.first(x), self.second.weight)[1]  # type: ignore[no-any-return]

    def no_zeros(self, x: torch.Tensor) -> torch.Tensor:
        return NoZeros.apply(self.weight, self.first(x), self.second.weight)[1]  # type: ignore[no-any-return]

    def complex_root(self, x: torch.Tensor) -> torch.Tensor:
        """A complex parameter is the nearest to the root."""
        return (self.first(x) * self.frequencies).real

    def autocast(self, x: torch.Tensor) -> torch.Tensor:
        """The weight is cast once, for two uses."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.first(x) + self.first(x * 2)
        return y.to(x.dtype) + x


FORWARDS = [
    name for name, value in vars(Module).items() if callable(value) and not name.startswith("_") and name != "conv"
] + ["conv"]


class Twice(nn.Module):
    def __init__(self, name: str, checkpointed: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Module(), Module()]).double()
        self.name, self.checkpointed, self.calls = name, checkpointed, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:

            def call(x: torch.Tensor, layer: Any = layer) -> torch.Tensor:
                self.calls += 1
                result: torch.Tensor = getattr(layer, self.name)(x)
                return result

            x = call(x) if self.checkpointed is None else checkpoint(call, x, use_reentrant=self.checkpointed)
        return x


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(ROWS, SIZE, dtype=torch.float64, requires_grad=True)
    return x, torch.randn(ROWS, SIZE, dtype=torch.float64)


def whole(model: nn.Module) -> tuple[list[torch.Tensor | None], int]:
    """All gradients of one backward, and its FLOPs."""
    x, grad = tensors()
    y = model(x)
    with Flops() as flops:
        y.backward(grad)
    grads = [x.grad, *(param.grad for param in model.parameters())]
    for param in model.parameters():
        param.grad = None
    return grads, flops.total


def in_halves(model: nn.Module) -> tuple[list[torch.Tensor | None], int, WeightHalf]:
    """The same of two halves. The first leaves parameters alone."""
    x, grad = tensors()
    with seen_checkpoints() as checkpoints:
        y = model(x)
    roots, inputs = [get_gradient_edge(y)], [get_gradient_edge(x)]
    del y
    with Flops() as flops:
        (grad_x,), half = divide(roots, [grad], inputs, recomputes=checkpoints.any)
        del roots
        assert all(param.grad is None for param in model.parameters())
        half.run()
    return [grad_x, *(param.grad for param in model.parameters())], flops.total, half


def same(actual: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    pairs = list(zip(actual, expected))
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)

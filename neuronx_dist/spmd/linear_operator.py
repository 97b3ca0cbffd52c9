"""Linear operators under `torch.func` and forward-mode AD: derivative, transpose and batching rule.

A linear operator is its own derivative: a tangent goes through the same collective as the value. It takes a batch of
tensors as one tensor with an additional dim, in one collective.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["LinearOperator", "linear"]


class LinearOperator(Protocol):
    """A linear function of one tensor, under any transforms."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the operator to a plain tensor, without any derivative."""

    def transposed(self) -> LinearOperator:
        """Returns the operator for gradients."""

    def batched(self) -> LinearOperator:
        """Returns the operator on tensors with an additional first dim."""


class _Linear(torch.autograd.Function):
    """The operator in the form of torch's transforms, which costs an eager call 10 µs that `_Typed` avoids."""

    @staticmethod
    def forward(x: torch.Tensor, operator: LinearOperator) -> torch.Tensor:
        return operator.value(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.operator = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.operator.transposed()(grad), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _: None) -> torch.Tensor:
        result: torch.Tensor = ctx.operator(tangent)
        return result

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], x: torch.Tensor, operator: LinearOperator
    ) -> tuple[torch.Tensor, int]:
        assert in_dims[0] is not None
        return operator.batched()(x.movedim(in_dims[0], 0)), 0


def linear(operator: LinearOperator, x: torch.Tensor) -> torch.Tensor:
    """Computes `operator(x)` by the rules of its class."""
    result: torch.Tensor = _Linear.apply(x, operator)
    return result

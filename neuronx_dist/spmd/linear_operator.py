"""Linear operators under `torch.func` and forward-mode AD: derivative, transpose and batching rule.

A linear operator is its own derivative: a tangent goes through the same collective as the value. It takes a batch of
tensors as one tensor with a dim more, in one collective.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["LinearOperator", "linear"]


class LinearOperator(Protocol):
    """A linear function of one tensor, whatever transforms are at work."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """The same of a plain tensor, without any derivative."""

    def transposed(self) -> LinearOperator:
        """The operator that gradients go through."""

    def batched(self) -> LinearOperator:
        """The operator on tensors with one dim more, in front."""


class _Linear(torch.autograd.Function):
    """In the form that torch's transforms need; it costs an eager call 10 µs, which `_Typed` does without."""

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
    """`operator(x)`, by its rules."""
    result: torch.Tensor = _Linear.apply(x, operator)
    return result

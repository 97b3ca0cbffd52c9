"""Calls of whole values, made from calls on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from neuronx_dist.parallelize.choose.strategies import candidates
from neuronx_dist.program.program import Call, Value
from neuronx_dist.rules.containers import substituted
from tests.rules.verify_rule import results_of

__all__ = ["by_name", "call_of", "parameter", "value_of"]


class _Received(TorchFunctionMode):
    """Notes what it receives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.calls.append((function, args, kwargs or {}))
        return function(*args, **(kwargs or {}))


def value_of(x: Tensor, name: str = "x") -> Value:
    return Value(name, "input", tuple(x.shape), x.dtype, x.requires_grad)


def call_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """The one call of torch that `function` makes of these arguments."""
    with _Received() as recorder:
        result = function(*args, **kwargs)
    ((target, args, kwargs),) = recorder.calls
    args, kwargs = substituted((args, kwargs), Tensor, value_of)
    return Call(target, args, kwargs, [value_of(x, "y") for x in results_of(result)])


def by_name(call: Call, size: int = 2, **options: Any) -> dict[str, tuple[Any, Any]]:
    """Types of operands and results by the name of the strategy."""
    found = candidates(call, "tp", size, **options)
    assert len({strategy.name for strategy in found}) == len(found)
    return {strategy.name: (strategy.operands, strategy.results) for strategy in found}


def parameter(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, requires_grad=True)

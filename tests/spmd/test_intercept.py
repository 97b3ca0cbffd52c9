"""Interception of `torch.autograd.Function.apply`: a class method in Python in torch 2.13, in C in torch 2.15."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neuronx_dist.spmd.intercept import apply_of, intercept

Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


class ScaledInTwoParts(torch.autograd.Function):
    """The same with `setup_context`, a default and a rule for vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, factor: float = 3.0) -> torch.Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


class Negated(Scaled):
    """A subclass that extends `apply`."""

    @classmethod
    def apply(cls, x: torch.Tensor, factor: float) -> Any:
        return -super().apply(x, factor)


def reporting(calls: Calls) -> Any:
    def hook(original: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        calls.append((cls.__name__, args, kwargs))
        return original(*args, **kwargs)

    return hook


def check_value_and_gradient(apply: Any, *args: Any, factor: float = 3.0) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    y = apply(x, *args)
    y.sum().backward()
    assert torch.equal(y, x * factor) and x.grad is not None and torch.equal(x.grad, torch.full((2,), factor))


@pytest.mark.parametrize(
    "function, args, factor", [(Scaled, (3.0,), 3.0), (ScaledInTwoParts, (), 3.0), (Negated, (3.0,), -3.0)]
)
def test_a_hook_sees_each_call_and_its_original_is_the_function(function: Any, args: Any, factor: float) -> None:
    calls: Calls = []
    with intercept(reporting(calls)):
        check_value_and_gradient(function.apply, *args, factor=factor)
    assert [(name, passed[1:], kwargs) for name, passed, kwargs in calls] == [(function.__name__, args, {})]
    check_value_and_gradient(function.apply, *args, factor=factor)
    assert len(calls) == 1


def test_transforms_work_inside() -> None:
    calls: Calls = []
    x = torch.tensor([1.0, 2.0])
    with intercept(reporting(calls)):
        assert torch.equal(torch.vmap(ScaledInTwoParts.apply)(x), 3 * x)
        assert torch.equal(torch.func.grad(lambda x: ScaledInTwoParts.apply(x).sum())(x), torch.full((2,), 3.0))
    assert {name for name, _, _ in calls} == {"ScaledInTwoParts", "VmappedScaledInTwoParts"}


@pytest.mark.parametrize("intercepted", [False, True])
def test_apply_of_another_class_is_torch_s(intercepted: bool) -> None:
    """The checker runs a subclass of the user's function, which no hook may receive."""
    calls: Calls = []
    subclass: Any = type("Scaled", (Scaled,), {})
    if intercepted:
        with intercept(reporting(calls)):
            check_value_and_gradient(apply_of(subclass), 3.0)
    else:
        check_value_and_gradient(apply_of(subclass), 3.0)
    assert not calls


def test_torch_is_as_before_after_the_last_hook() -> None:
    before = vars(torch.autograd.Function)["apply"]
    with intercept(reporting([])):
        with intercept(reporting([])):
            pass
        assert vars(torch.autograd.Function)["apply"] is not before
    assert vars(torch.autograd.Function)["apply"] is before

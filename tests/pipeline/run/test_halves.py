"""A graph's backward in halves: the gradients of a whole one, nothing computed twice, every hook run once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from neuronx_dist.pipeline.run import halves
from neuronx_dist.pipeline.run.halves import WeightHalf, divide
from neuronx_dist.pipeline.run.recomputation import seen_checkpoints
from tests.pipeline.run.halved_models import (
    FORWARDS,
    ROWS,
    SIZE,
    Asked,
    Both,
    Module,
    Twice,
    in_halves,
    same,
    tensors,
    whole,
)
from tests.support.counting import Flops, Storages

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("checkpointed", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("name", FORWARDS)
def test_gradients_and_work_are_those_of_a_whole_backward(name: str, checkpointed: bool | None) -> None:
    """Bit for bit; each layer is recomputed once."""
    torch.manual_seed(0)
    model = Twice(name, None if checkpointed is None or name in ("not_of_x", "itself") else False)
    expected, flops = whole(model)
    model.checkpointed = model.checkpointed if checkpointed is None or model.checkpointed is None else checkpointed
    calls, model.calls, Both.calls = model.calls, 0, 0
    grads, flops_in_halves, half = in_halves(model)
    assert same(grads, expected)
    assert flops_in_halves == flops and model.calls == calls
    assert half.once == (["BothBackward"] * 2 if name == "computes_both" else [])
    assert Both.calls == (2 if name == "computes_both" else 0)


def test_a_product_of_each_half() -> None:
    """Half of the FLOPs of linear layers are in each half; of a custom function that was not told, all in the first."""
    for name, share in (("plain", 3), ("asks", 3), ("computes_both", 4)):  # of six
        torch.manual_seed(0)
        model = Twice(name, None)
        _, flops = whole(model)
        x, grad = tensors()
        y = model(x)
        with Flops() as first:
            _, half = divide([get_gradient_edge(y)], [grad], [get_gradient_edge(x)])
        with Flops() as second:
            half.run()
        assert 6 * first.total == share * flops and first.total + second.total == flops


@pytest.mark.parametrize("branches", [True, False], ids=["branches", "none"])
def test_a_result_of_parameters_alone_recomputes_nothing_again(branches: bool) -> None:
    """A checkpointed layer gives it beside its output, as a root of its own."""
    model = Module().double()
    calls = 0

    def layer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal calls
        calls += 1
        return model.first(x).tanh() if branches else x.tanh(), (model.bias * model.bias.exp()).sum()

    grads = []
    for divided in (False, True):
        x, grad = tensors()
        with seen_checkpoints() as checkpoints:
            results = checkpoint(layer, x, use_reentrant=False)
        calls = 0
        if divided:
            roots = [get_gradient_edge(result) for result in results]
            (grad_x,), half = divide(roots, [grad, None], [get_gradient_edge(x)], recomputes=checkpoints.any)
            assert calls == 1
            half.run()
        else:
            torch.autograd.backward(results, [grad, None])
            grad_x = x.grad
        assert calls == 1
        grads.append([grad_x, *(param.grad for param in model.parameters())])
        model.zero_grad()
    assert same(*grads)


def test_hooks_run_once() -> None:
    """Hooks of parameters run in the second half; hooks of activations and nodes in the first, with effect."""
    seen: list[str] = []

    def note(name: str, factor: float = 1.0) -> Callable[[Any], Any]:
        def hook(grad: Any) -> Any:
            seen.append(name)
            return None if factor == 1.0 else grad * factor

        return hook

    def forward(model: Module, x: torch.Tensor) -> torch.Tensor:
        y = model.first(x)
        y.register_hook(note("first", 3.0))
        derived = model.weight * 2
        derived.register_hook(note("derived", 5.0))
        z = F.linear(y, derived)
        assert z.grad_fn is not None
        z.grad_fn.register_prehook(lambda grads: (grads[0] * 7,))
        z.grad_fn.register_hook(lambda *_: seen.append("node"))
        return z

    torch.manual_seed(0)
    model = Module().double()
    model.first.weight.register_hook(note("parameter", 2.0))
    model.first.bias.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    x, grad = tensors()
    forward(model, x).backward(grad)
    expected: list[torch.Tensor | None] = [x.grad, *(param.grad for param in model.parameters())]
    names = sorted(seen)
    seen.clear()
    model.zero_grad()
    x, grad = tensors()
    y = forward(model, x)
    (grad_x,), half = divide([get_gradient_edge(y)], [grad], [get_gradient_edge(x)])
    assert sorted(seen) == ["first", "node"]
    half.run()
    assert sorted(seen) == names == ["accumulated", "derived", "first", "node", "parameter"]
    assert same([grad_x, *(param.grad for param in model.parameters())], expected)


def test_a_parameter_accumulates_once() -> None:
    """Even one that is used in several ways; and what has been made becomes its gradient without a copy."""
    model = Module().double()
    counts = dict.fromkeys(model.parameters(), 0)
    for param in counts:

        def count(param: torch.Tensor) -> None:
            counts[param] += 1  # type: ignore[index]

        param.register_post_accumulate_grad_hook(count)
    x, grad = tensors()
    y = F.linear(Asked.apply(x, model.weight, ""), model.weight)
    y = Asked.apply(y @ (model.weight * 2), model.weight, "")
    _, half = divide([get_gradient_edge(y)], [grad], [get_gradient_edge(x)])
    half.run()
    assert counts[model.weight] == 1

    products: list[int] = []

    class Made(Asked):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            results = Asked.backward(ctx, grad)
            if results[1] is not None:
                products.append(results[1].data_ptr())
            return results

    weight = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64))
    y = Made.apply(x * 1, weight, "")
    _, half = divide([get_gradient_edge(y)], [grad], [get_gradient_edge(x)])
    half.run()
    assert weight.grad is not None and products == [weight.grad.data_ptr()]


def test_gradients_are_given_away_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight half does not hold the gradients of all parameters; those that are used twice it does."""
    monkeypatch.setattr(halves, "_MOST_DUE", 0)
    calls: list[str] = []
    accumulate = WeightHalf._accumulate
    monkeypatch.setattr(WeightHalf, "_accumulate", lambda half: (calls.append(""), accumulate(half)))
    for name, times in (("plain", 7), ("used_twice", 1)):
        torch.manual_seed(0)
        model = Twice(name, None)
        expected, _ = whole(model)
        grads, _, _ = in_halves(model)
        assert same(grads, expected) and len(calls) == times
        calls.clear()
    x, grad = tensors()
    weight = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64))
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("hook"))
    doubled = weight * 2
    roots = [get_gradient_edge(F.linear(x, doubled)), get_gradient_edge(doubled)]
    divide(roots, [grad, doubled.detach()], [get_gradient_edge(x)])[1].run()
    assert calls == ["", "hook"]


def test_what_only_the_first_half_needs_is_freed_after_it() -> None:
    """Outputs of activation functions and of attention; inputs of linear layers stay, and go with the second half."""
    torch.manual_seed(0)
    linears = nn.ModuleList([nn.Linear(SIZE, SIZE) for _ in range(3)]).double()
    x, grad = tensors()
    y = linears[0](x)
    activated = F.gelu(y)
    z = linears[1](activated).exp()
    w = linears[2](z)
    references = {name: weakref.ref(t) for name, t in {"gelu": y, "second": activated, "third": z}.items()}
    roots = [get_gradient_edge(w)]
    node = weakref.ref(w)
    del y, activated, z, w
    assert node() is None
    _, half = divide(roots, [grad], [get_gradient_edge(x)])
    del roots
    storages = {name: ref() is not None for name, ref in references.items()}
    assert storages == {"gelu": False, "second": True, "third": True}
    half.run()
    del half
    assert all(ref() is None for ref in references.values())


def test_a_freed_part_says_so() -> None:
    x, grad = tensors()
    y = F.gelu(x * 2)
    divide([get_gradient_edge(y)], [grad], [get_gradient_edge(x)])
    with pytest.raises(RuntimeError, match="freed after the first half"):
        y.backward(grad)


@pytest.mark.parametrize("checkpointed", [None, False], ids=["plain", "checkpoint"])
@pytest.mark.parametrize("name", ["plain", "asks", "computes_both", "in_place"])
def test_nothing_is_left_behind(name: str, checkpointed: bool | None) -> None:
    """A weight half that is over holds no memory; no circle of references waits for the garbage collector."""
    model = Twice(name, checkpointed)
    x, grad = tensors()
    outside = [x, grad, *model.parameters()]
    gc.collect()
    gc.disable()
    storages = Storages()
    try:
        with storages:
            with seen_checkpoints() as checkpoints:
                y = model(x)
            roots, inputs = [get_gradient_edge(y)], [get_gradient_edge(x)]
            del y
            _, half = divide(roots, [grad], inputs, recomputes=checkpoints.any)
            del roots, inputs, _
            half.run()
            for tensor in (*outside, *(param.grad for param in model.parameters() if param.grad is not None)):
                storages.forget(tensor)
            assert storages.alive() == 0
    finally:
        gc.enable()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")


@pytest.mark.parametrize("checkpointed", [None, False], ids=["plain", "checkpoint"])
def test_nothing_is_left_behind_by_a_first_half_that_fails(checkpointed: bool | None) -> None:
    model = Twice("plain", checkpointed)
    x, grad = tensors()
    storages = Storages()
    with storages:
        with seen_checkpoints() as checkpoints:
            y = model(Fails.apply(x))
        roots, inputs = [get_gradient_edge(y)], [get_gradient_edge(x)]
        del y
        with pytest.raises(ValueError, match="no"):
            divide(roots, [grad], inputs, recomputes=checkpoints.any)
        del roots, inputs
        for leaf in (x, grad, *model.parameters()):
            storages.forget(leaf)
        gc.collect()
        assert storages.alive() == 0


@pytest.mark.parametrize("name", ["plain", "in_place"])
def test_nothing_is_kept_after_a_recomputation_that_fails(name: str) -> None:
    """A whole backward afterwards recomputes each time, as torch does."""
    model = Module().double()
    x, grad = tensors()
    fails, calls = False, 0

    def layer(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if fails:
            raise ValueError("no")
        result: torch.Tensor = getattr(model, name)(x)
        return result

    with seen_checkpoints() as checkpoints:
        y, other = (checkpoint(layer, x, use_reentrant=False) for _ in range(2))
    fails = True
    with pytest.raises(ValueError, match="no"):
        divide([get_gradient_edge(y)], [grad], [get_gradient_edge(x)], recomputes=checkpoints.any)
    fails = False
    other.backward(grad, retain_graph=True)
    calls = 0
    other.backward(grad)
    assert calls == 1


def test_what_ran_whole_keeps_only_the_gradients_that_it_made() -> None:
    model = Module().double()
    x, grad = tensors()
    with Storages() as storages:
        y = Both.apply(x * 2, model.weight)
        roots = [get_gradient_edge(y)]
        del y
        _, half = divide(roots, [grad], [get_gradient_edge(x)])
        del roots, _
        for leaf in (x, grad, model.weight):
            storages.forget(leaf)
        assert half.once == ["BothBackward"] and storages.alive() == model.weight.nbytes
        half.run()
    assert model.weight.grad is not None


def test_several_roots_and_inputs() -> None:
    """One root leads to no input, one input is reached by no root, and one root is a loss."""
    torch.manual_seed(0)
    model = Module().double()

    def forward(x: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
        y = model.first(x)
        return [y, model.second(x.detach()), (model.norm(y) * x).sum()]

    x, grad = tensors()
    other = x.detach().clone().requires_grad_()
    y, beside, loss = forward(x, other)
    torch.autograd.backward([y, beside, loss], [grad, grad, None])
    expected: list[torch.Tensor | None] = [x.grad, *(param.grad for param in model.parameters())]
    model.zero_grad()
    x, grad = tensors()
    roots = [get_gradient_edge(root) for root in forward(x, other)]
    grads, half = divide(roots, [grad, grad, None], [get_gradient_edge(x), get_gradient_edge(other)])
    half.run()
    assert grads[1] is None
    assert same([grads[0], *(param.grad for param in model.parameters())], expected)
    grads, half = divide([get_gradient_edge(model.first(other.detach()).sum())], [None], [])
    model.zero_grad()
    half.run()
    assert grads == [] and torch.equal(model.first.bias.grad, torch.full((SIZE,), float(ROWS)).double())


@pytest.mark.slow
def test_compiled_layers_run_whole_in_the_first_half() -> None:
    torch.manual_seed(0)
    model = Module().double()
    compiled = torch.compile(model.plain, backend="aot_eager")
    x, grad = tensors()
    compiled(x).backward(grad)
    expected: list[torch.Tensor | None] = [x.grad, *(param.grad for param in model.parameters())]
    model.zero_grad()
    x, grad = tensors()
    roots = [get_gradient_edge(compiled(x))]
    (grad_x,), half = divide(roots, [grad], [get_gradient_edge(x)])
    assert half.once == ["CompiledFunctionBackward"]
    half.run()
    assert same([grad_x, *(param.grad for param in model.parameters())], expected)

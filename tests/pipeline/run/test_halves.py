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
from tests.support.counting import Flops, Storages

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
    for in_halves in (False, True):
        x, grad = tensors()
        with seen_checkpoints() as checkpoints:
            results = checkpoint(layer, x, use_reentrant=False)
        calls = 0
        if in_halves:
            roots = [get_gradient_edge(each) for each in results]
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
    """Of parameters in the second half; of activations and nodes in the first, with effect."""
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

    made: list[int] = []

    class Made(Asked):
        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            results = Asked.backward(ctx, grad)
            if results[1] is not None:
                made.append(results[1].data_ptr())
            return results

    weight = nn.Parameter(torch.randn(SIZE, SIZE, dtype=torch.float64))
    y = Made.apply(x * 1, weight, "")
    _, half = divide([get_gradient_edge(y)], [grad], [get_gradient_edge(x)])
    half.run()
    assert weight.grad is not None and made == [weight.grad.data_ptr()]


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
            for each in (*outside, *(param.grad for param in model.parameters() if param.grad is not None)):
                storages.forget(each)
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
        for each in (x, grad, *model.parameters()):
            storages.forget(each)
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
        for each in (x, grad, model.weight):
            storages.forget(each)
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

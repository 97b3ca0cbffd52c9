"""Decomposed losses and means equal the original to rounding, forward and backward; what cannot be stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.program import run_program
from neuronx_dist.program.record import record_program
from tests.parallelize.support.programs import tensors_of


class Function(nn.Module):
    """A function of a weight and of what forward is given."""

    def __init__(self, function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.function = function
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, target: Any = None) -> Any:
        return self.function(self.weight, target)


def both(module: Function, target: Any) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """(result, gradient) of the module and of its decomposed program, and what that calls."""
    arguments = {} if target is None else {"target": target}
    program = decomposed(record_program(module, arguments, training=True))
    pairs = []
    for run in (lambda: module(**arguments), lambda: run_program(program, tensors_of(program, module, arguments))):
        module.weight.grad = None
        result = run()
        result.sum().backward()
        assert module.weight.grad is not None
        pairs.append([result.detach(), module.weight.grad])
    return pairs[0], pairs[1], [call.name for call in program.calls]


CLASSES = torch.tensor([1, -100, 0, 4, 2, -100])
OTHER_CLASSES = torch.tensor([1, 3, 0, 4, 2, 3])
FLOATS = torch.linspace(0.1, 0.9, 30, dtype=torch.float64).reshape(6, 5)
SIGNS = FLOATS.sub(0.5).sign()

CASES: dict[str, tuple[Callable[..., Any], Any]] = {
    "mean": (lambda w, t: w.mean(), None),
    "torch.mean": (lambda w, t: torch.mean(w), None),
    "mean over all dims": (lambda w, t: w.mean((0, 1), keepdim=True), None),
    "mean with dtype": (lambda w, t: w.mean(dtype=torch.float32), None),
    "cross entropy": (lambda w, t: F.cross_entropy(w, t), CLASSES),
    "cross entropy, another index": (lambda w, t: F.cross_entropy(w, t, ignore_index=3), OTHER_CLASSES),
    "cross entropy, smoothed": (lambda w, t: F.cross_entropy(w, t, label_smoothing=0.2), CLASSES),
    "cross entropy of probabilities": (lambda w, t: F.cross_entropy(w, t), FLOATS),
    "nll": (lambda w, t: F.nll_loss(w.log_softmax(1), t, reduction="mean"), CLASSES),
    "mse": (F.mse_loss, FLOATS),
    "mse that broadcasts": (lambda w, t: F.mse_loss(w, t[:, :1].expand(-1, 5)), FLOATS),
    "l1": (F.l1_loss, FLOATS),
    "smooth l1": (lambda w, t: F.smooth_l1_loss(w, t, beta=0.5), FLOATS),
    "huber": (lambda w, t: F.huber_loss(w, t, delta=0.7), FLOATS),
    "bce": (lambda w, t: F.binary_cross_entropy(w.sigmoid(), t), FLOATS),
    "bce, weighted": (lambda w, t: F.binary_cross_entropy(w.sigmoid(), t, t.detach() + 1), FLOATS),
    "bce with logits": (lambda w, t: F.binary_cross_entropy_with_logits(w, t, pos_weight=t[0]), FLOATS),
    "kl": (lambda w, t: F.kl_div(w.log_softmax(1), t), FLOATS),
    "kl per row": (lambda w, t: F.kl_div(w.log_softmax(1), t, reduction="batchmean"), FLOATS),
    "soft margin": (F.soft_margin_loss, SIGNS),
    "poisson": (F.poisson_nll_loss, FLOATS),
    "hinge": (F.hinge_embedding_loss, SIGNS),
    "margin ranking": (lambda w, t: F.margin_ranking_loss(w, w * w, t, margin=0.3), SIGNS),
}
SUMMED = {"mean", "torch.mean", "mean over all dims", "mean with dtype"}


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")
@pytest.mark.parametrize("name", CASES)
def test_means_become_sums(name: str) -> None:
    function, target = CASES[name]
    expected, computed, calls = both(Function(function, 6, 5), target)
    tolerance = 1e-6 if name == "mean with dtype" else 1e-14
    for a, b in zip(expected, computed, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    assert "div" in calls and ("sum" in calls or name not in SUMMED) and "mean" not in calls


KEPT: dict[str, tuple[Callable[..., Any], Any]] = {
    "mean over a dim": (lambda w, t: w.mean(1), None),
    "class weights": (lambda w, t: F.cross_entropy(w, t, weight=w[0].detach().abs()), CLASSES),
    "a sum": (lambda w, t: F.cross_entropy(w, t, reduction="sum"), CLASSES),
    "each element": (lambda w, t: F.mse_loss(w, t, reduction="none"), FLOATS),
    "weighted squares": (lambda w, t: F.mse_loss(w, t, weight=t), FLOATS),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_stays(name: str) -> None:
    function, target = KEPT[name]
    expected, computed, calls = both(Function(function, 6, 5), target)
    assert all(torch.equal(a, b) for a, b in zip(expected, computed, strict=True))
    assert "div" not in calls


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mean_of_sixteen_bit_numbers_is_computed_in_float32(dtype: torch.dtype) -> None:
    """A sum of 16-bit numbers would overflow, or lose the small ones."""
    expected, computed, _ = both(Function(lambda w, t: (w + 40).mean(), 64, 64, dtype=dtype), None)
    assert computed[0].dtype == dtype
    assert torch.equal(expected[0], computed[0]) and torch.equal(expected[1], computed[1])


@pytest.mark.each_value
@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in CASES if name not in SUMMED])
def test_losses_of_sixteen_bits_are_those_of_float32(name: str, dtype: torch.dtype) -> None:
    """The sum exceeds the numbers of float16; gradients are of a scaled loss, as in mixed precision."""
    function, target = CASES[name]
    samples = 2**17
    target = target[torch.arange(samples) % len(target)]
    target = target.to(dtype) if target.is_floating_point() else target
    module = Function(function, samples, 5, dtype=dtype)
    program = decomposed(record_program(module, {"target": target}, training=True))
    computed = run_program(program, tensors_of(program, module, {"target": target}))
    weight = module.weight.detach().float().requires_grad_()
    expected = function(weight, target.float() if target.is_floating_point() else target)
    gradients = [
        torch.autograd.grad(loss.float() * 2**15, at)[0] for loss, at in ((computed, module.weight), (expected, weight))
    ]
    digits = 8 * torch.finfo(dtype).eps
    assert computed.dtype == gradients[0].dtype == dtype
    torch.testing.assert_close(computed.float(), expected, rtol=digits, atol=0)
    assert (gradients[0].float() - gradients[1]).norm() < digits * gradients[1].norm()


def test_cross_entropy_of_ignored_labels_alone_is_not_a_number() -> None:
    expected, computed, _ = both(Function(F.cross_entropy, 6, 5), torch.full((6,), -100))
    assert expected[0].isnan() and computed[0].isnan()


def test_images_and_single_samples() -> None:
    """Classes are dim 1 of a batch, dim 0 of a sample."""
    for shape, target in [((2, 5, 3, 2), torch.arange(12).reshape(2, 3, 2) % 5), ((5,), torch.tensor(3))]:
        for given in (target, F.one_hot(target, 5).movedim(-1, 1 if target.ndim else 0).double()):
            expected, computed, calls = both(Function(F.cross_entropy, *shape), given)
            for a, b in zip(expected, computed, strict=True):
                torch.testing.assert_close(b, a, rtol=1e-14, atol=1e-14)
            assert "div" in calls


def test_dtypes_under_autocast_are_those_of_the_call() -> None:
    """Autocast computes a loss in float32: so is its sum."""

    def loss(w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.cross_entropy(w @ w.T, target)

    module = Function(loss, 6, 6, dtype=torch.float32)
    program = decomposed(record_program(module, {"target": CLASSES}, training=True))
    dtypes = {call.name: call.results[0].dtype for call in program.calls}
    assert dtypes["matmul"] == torch.bfloat16 and dtypes["cross_entropy"] == dtypes["div"] == torch.float32
    expected, computed, _ = both(module, CLASSES)
    assert expected[0].dtype == computed[0].dtype
    torch.testing.assert_close(computed[1], expected[1], rtol=1e-2, atol=1e-3)

"""Reductions over two mesh dims: one collective over both, where the job's axes have the group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm, spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor, distribute_tensor
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs

REDUCTIONS = {
    "sum": (lambda x: x.sum(), ["all_reduce"]),
    "mean": (lambda x: x.mean((0, 1)), ["all_reduce"]),
    "norm": (lambda x: x.norm(), ["all_reduce"]),
    "amax": (lambda x: x.amax(), ["all_reduce"] * 2),  # the second counts for the gradient
    "logsumexp": (lambda x: x.logsumexp((0, 1)), ["exchange"]),
    "var": (lambda x: x.var(), ["exchange"]),
    "prod": (lambda x: x.prod(), ["exchange"]),
    "any": (lambda x: (x > 0).any(), ["all_reduce"]),
    "mse_loss": (lambda x: F.mse_loss(x, x * 2), ["all_reduce"]),
    "layer_norm": (lambda x: F.layer_norm(x, tuple(x.shape)), ["exchange"]),
    "rms_norm": (lambda x: F.rms_norm(x, tuple(x.shape)), ["all_reduce"]),
}


def image() -> torch.Tensor:
    return torch.randn(8, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_collective_over_both(name: str) -> None:
    function, collectives = REDUCTIONS[name]
    plain = image()
    expected = function(plain)
    if expected.requires_grad:
        expected.square().sum().backward()

    def rank(mesh: Any) -> list[comm.Call]:
        x = distribute_tensor(image(), mesh, [Shard(0), Shard(1)], sizes=[(5, 3), (6, 0)], src=None)
        with comm.record() as calls:
            y = function(x)
        assert_close(y.full_tensor().detach(), expected.detach(), name)
        if expected.requires_grad:
            y.square().sum().backward()
            assert_close(x.grad.full_tensor(), plain.grad, f"gradient of {name}")
        return calls

    for calls in on_ranks(4, rank, (2, 2)):
        assert [verb.replace("all_gather", "exchange") for verb in verbs(calls)] == collectives


def test_gradients_of_weights_are_reduced_once() -> None:
    def rank(mesh: Any) -> list[comm.Call]:
        x = distribute_tensor(image(), mesh, [Shard(0), Shard(1)], src=None)
        w, b = (
            torch.ones(4, 3, dtype=torch.float64).requires_grad_(),
            torch.ones(4, dtype=torch.float64).requires_grad_(),
        )
        y = F.linear(x, w, b)
        with comm.record() as calls:
            y.backward(torch.ones_like(y))
        assert_close(w.grad, image().detach().sum((0, 1)).expand(4, 3), "weight")
        assert_close(b.grad, torch.full((4,), 48.0, dtype=torch.float64), "bias")
        return calls

    for calls in on_ranks(4, rank, (2, 2)):
        assert [(call.verb, call.bytes) for call in calls] == [("all_reduce", (4 * 3 + 4) * 8)]


def test_a_partial_over_both_is_reduced_once() -> None:
    def rank(mesh: Any) -> list[comm.Call]:
        x = ShardTensor.from_local(torch.ones(3), mesh, [Partial(), Partial()])
        with comm.record() as calls:
            assert x.full_tensor().tolist() == [4.0] * 3
        return calls

    assert [verbs(calls) for calls in on_ranks(4, rank, (2, 2))] == [["all_reduce"]] * 4


def test_a_partial_is_reduced_together_with_a_sharded_dim() -> None:
    def rank(mesh: Any) -> list[comm.Call]:
        x = ShardTensor.from_local(torch.ones(2, 3), mesh, [Partial(), Shard(0)])
        with comm.record() as calls:
            total = x.sum(0)
            assert total.placements == (Replicate(), Replicate()) and total.to_local().tolist() == [8.0] * 3
        return calls

    assert [verbs(calls) for calls in on_ranks(4, rank, (2, 2))] == [["all_reduce"]] * 4


def test_dims_whose_group_is_no_axis_are_reduced_one_after_the_other() -> None:
    def rank(mesh: Any) -> list[comm.Call]:
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate(), Shard(1)], src=None)
        with comm.record() as calls:
            assert x.sum().full_tensor().item() == 16
        return calls

    assert [verbs(calls) for calls in on_ranks(8, rank, (2, 2, 2))] == [["all_reduce"] * 2] * 8


def test_the_checker_follows_axes_together_and_other_dims_one_by_one() -> None:
    def rank(count: int) -> None:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
        with spmd.SpmdTypeMode():
            x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)], src=None)
            with comm.record() as calls:
                assert x.sum().full_tensor().item() == 16
        assert verbs(calls) == ["all_reduce"] * count

    threads.run(Mesh(4, tp=2), rank, 1)
    threads.run(Mesh(4), rank, 2)


@pytest.mark.parametrize("dim", [0, 1])
def test_log_sum_exp_of_columns_of_minus_infinity(dim: int) -> None:
    """A column of nothing else, one where a rank's shard has nothing else, one with +inf; and what is not NaN there."""
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 0] = x[:2, 1] = -torch.inf
    x[1, 2] = torch.inf

    def rank(mesh: Any) -> None:
        given = distribute_tensor(x, mesh, [Shard(dim)], src=None)
        for reduced in (0, 1, (0, 1)):
            torch.testing.assert_close(given.logsumexp(reduced).full_tensor(), x.logsumexp(reduced), rtol=0, atol=1e-12)

    on_ranks(2, rank)


def test_a_bool_is_the_correction_and_not_a_dim() -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rank(mesh: Any) -> None:
        given = distribute_tensor(x, mesh, [Shard(0)], src=None)
        for unbiased in (False, True):
            for name in ("var", "std"):
                expected = getattr(x, name)(unbiased)
                result = getattr(given, name)(unbiased)
                assert result.shape == ()
                torch.testing.assert_close(result.full_tensor(), expected, rtol=0, atol=1e-12)

    on_ranks(2, rank)


HALVES = {  # fp16 ends at 65504: the sum over a dim, or what divides it, is larger
    "sum-dim": lambda x, t: (x / 8).sum(0),
    "mean": lambda x, t: x.mean(),
    "mean-dim": lambda x, t: x.mean(0),
    "mean-whole": lambda x, t: x.mean(1),
    "norm": lambda x, t: (x / 32).norm(),
    "norm-3": lambda x, t: torch.linalg.vector_norm(x / 32, 3),
    "var": lambda x, t: x.var(),
    "std-dim": lambda x, t: x.std(0),
    "var_mean": lambda x, t: torch.var_mean(x),
    "clip": lambda x, t: torch.nn.utils.get_total_norm([x / 32]),
    "mse": lambda x, t: F.mse_loss(x, t),
    "mse-weight": lambda x, t: F.mse_loss(x, t, weight=t.abs() + 100),
    "l1": lambda x, t: F.l1_loss(x, t),
    "kl": lambda x, t: F.kl_div(x, t.abs(), reduction="batchmean"),
    "ce": lambda x, t: F.cross_entropy(x, torch.zeros(4096, dtype=torch.int64)),
    "ce-weight": lambda x, t: F.cross_entropy(x, torch.zeros(4096, dtype=torch.int64), torch.full_like(t[0], 30)),
    "ce-probabilities": lambda x, t: F.cross_entropy(x, t.abs() / 2),
    "ce-smooth": lambda x, t: F.cross_entropy(x, torch.zeros(4096, dtype=torch.int64), label_smoothing=0.4),
    "logsumexp": lambda x, t: torch.logsumexp(x, 0),
    "cosine": lambda x, t: F.cosine_similarity(x, t, dim=0),
}


@pytest.mark.each_pair
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_summed_in_float32(name: str, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = (torch.randn(4096, 8, generator=generator) * 4 + 100).to(dtype)
    b = torch.randn(4096, 8, generator=generator).to(dtype)

    def results(x: torch.Tensor, t: torch.Tensor) -> list[torch.Tensor]:
        y = HALVES[name](x, t)
        return list(y) if isinstance(y, tuple) else [y]

    plain, exact = results(a, b), results(a.double(), b.double())
    assert all(each.dtype == dtype for each in plain)
    near = 4 * torch.finfo(dtype).eps  # of the terms too, as torch's

    def rank(mesh: Any) -> None:
        x, t = (distribute_tensor(each.clone().requires_grad_(), mesh, [Shard(dim)], src=None) for each in (a, b))
        found = results(x, t)
        for y, expected in zip(found, exact, strict=True):
            assert y.dtype == dtype
            torch.testing.assert_close(y.full_tensor().detach().double(), expected, rtol=near, atol=near)
        if found[0].requires_grad:
            found[0].sum().backward()
            assert x.grad.full_tensor().isfinite().all()

    on_ranks(2, rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_sums_over_classes_in_half_precision(dim: int, dtype: torch.dtype) -> None:
    """Sums above 65504, the largest fp16; in bf16 each summand would be lost against 256."""
    x = torch.randn(2, 70_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    target = torch.tensor([5, 69_000])
    near = 4 * torch.finfo(dtype).eps

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        smooth = [F.cross_entropy(x, target, label_smoothing=0.4, reduction=each) for each in ("none", "mean")]
        return [torch.logsumexp(x * 0, 1), torch.logsumexp(x, 1), *smooth]

    exact = results(x.double())

    def rank(mesh: Any) -> None:
        given = distribute_tensor(x.clone().requires_grad_(), mesh, [Shard(dim)], src=None)
        for y, expected in zip(results(given), exact, strict=True):
            assert y.dtype == dtype
            torch.testing.assert_close(y.full_tensor().detach().double(), expected, rtol=near, atol=near)
            y.sum().backward()
            assert given.grad.full_tensor().isfinite().all()

    on_ranks(2, rank)

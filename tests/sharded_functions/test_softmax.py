"""Softmax, log-softmax and log-sum-exp of shards are those of the whole, and what travels for them."""

from __future__ import annotations

from math import inf

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.sharded_functions.softmax import log_softmax, log_sum_exp, softmax
from tests.sharded_functions.shards import SIZES, assert_like_whole, randn, shard, verbs_of

FUNCTIONS = {"softmax": (softmax, torch.softmax), "log_softmax": (log_softmax, torch.log_softmax)}
ROWS = {
    "usual": randn(3, 8, 2),
    "large": randn(3, 8, 2) * 2000 - 5000,
    "-inf": randn(3, 8, 2).masked_fill(randn(3, 8, 2, seed=3) > 0.3, -inf),
    "nothing but -inf in a shard": torch.cat((randn(3, 6, 2) - 1e3, torch.full((3, 2, 2), -inf).double()), 1),
    "no rows": randn(0, 8, 2),
}


@pytest.mark.each_pair
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_of_shards(name, rows, sizes):
    of_shard, of_whole = FUNCTIONS[name]
    assert_like_whole(lambda x: of_shard(x, 1, axis="tp"), lambda x: of_whole(x, 1), ROWS[rows], 1, sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dims", [1, (0, 1), (0, 1, 2)])
def test_log_sum_exp(dims, sizes):
    x = randn(3, 8, 2) * 100
    ours, theirs = lambda x: log_sum_exp(x, dims, ["tp"]), lambda x: x.logsumexp(dims, keepdim=True)
    assert_like_whole(ours, theirs, x, 1, sizes, summed=True)


def test_log_sum_exp_over_two_axes():
    x = randn(4, 6)

    def rank():
        part = x.chunk(2, 0)[comm.rank("dp")].chunk(2, 1)[comm.rank("tp")]
        return log_sum_exp(part, (0, 1), ["tp", "dp"])

    for y in threads.run(Mesh(4, tp=2), rank):
        torch.testing.assert_close(y, x.logsumexp((0, 1), keepdim=True), rtol=1e-12, atol=0)


@pytest.mark.parametrize("row", [[-inf] * 8, [inf] + [0.0] * 7, [float("nan")] + [0.0] * 7, [-inf] * 7 + [inf]])
def test_rows_that_are_not_finite(row):
    """NaN and infinities are torch's."""
    x = torch.tensor([row])

    def rank():
        part = shard(x, 1, (5, 3))
        return softmax(part, 1, axis="tp"), log_softmax(part, 1, axis="tp"), log_sum_exp(part, 1, ["tp"])

    ours = threads.run(Mesh(2, tp=2), rank)
    for number, of_whole in enumerate((torch.softmax, torch.log_softmax)):
        joined = torch.cat([results[number] for results in ours], 1)
        torch.testing.assert_close(joined, of_whole(x, 1), equal_nan=True)
    for *_, y in ours:
        torch.testing.assert_close(y, x.logsumexp(1, keepdim=True), equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype, name):
    of_shard, of_whole = FUNCTIONS[name]
    x = (randn(2, 70_000)).to(dtype)
    for rank, y in enumerate(threads.run(Mesh(2, tp=2), lambda: of_shard(shard(x, 1, (35_000,) * 2), 1, axis="tp"))):
        assert y.dtype == dtype
        torch.testing.assert_close(y, of_whole(x, 1).chunk(2, 1)[rank], rtol=2 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_dtype_to_compute_in(name):
    of_shard, of_whole = FUNCTIONS[name]
    x = randn(2, 8).float()
    joined = torch.cat(
        threads.run(Mesh(2, tp=2), lambda: of_shard(shard(x, 1, (3, 5)), 1, torch.float64, axis="tp")), 1
    )
    torch.testing.assert_close(joined, of_whole(x, 1, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_collective_in_each_pass(name):
    """Two numbers a row, and the gradient of one."""
    of_shard, _ = FUNCTIONS[name]
    assert verbs_of(lambda x: of_shard(x, 1, axis="tp"), randn(3, 8), 1, 4) == [
        [("all_gather", 6)],
        [("all_reduce", 3)],
    ]
    assert verbs_of(lambda x: of_shard(x, 1, axis="tp"), randn(3, 8), 1, 1) == [[], []]
    assert verbs_of(lambda x: log_sum_exp(x, 1, ["tp"]), randn(3, 8), 1, 4) == [[("all_gather", 6)], []]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_of_a_gradient(name):
    of_shard, of_whole = FUNCTIONS[name]
    x, weights = randn(3, 8), randn(3, 8, seed=3)

    def twice(x, y, weights):
        (gradient,) = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.pow(3).sum(), x)[0]

    whole = x.clone().requires_grad_()
    expected = twice(whole, of_whole(whole, 1), weights)

    def rank():
        part = shard(x, 1, (5, 3)).clone().requires_grad_()
        y = of_shard(part, 1, axis="tp")
        assert "OneNode" in y.grad_fn.name()
        return twice(part, y, shard(weights, 1, (5, 3)))

    joined = torch.cat(threads.run(Mesh(2, tp=2), rank), 1)
    torch.testing.assert_close(joined, expected, rtol=1e-10, atol=1e-12)

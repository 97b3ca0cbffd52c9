"""Losses, softmax and running sums beyond the table: what travels, defects of other packages, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.shard_tensor import Replicate, Shard, ShardTensor, distribute_tensor, promotion_mode
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def on(mesh, x, placement, sizes=None):
    return distribute_tensor(
        x.clone().requires_grad_(x.is_floating_point()), mesh, [placement], sizes=[sizes], src=None
    )


TARGETS = torch.tensor([3, -100, 0, 6, 2, -100])


@pytest.mark.parametrize(
    "function, forward, backward",
    [
        (lambda x: F.mse_loss(x, x.detach() * 2), ["all_reduce"], []),
        (lambda x: F.mse_loss(x, x.detach() * 2, reduction="none"), [], []),
        (lambda x: F.cross_entropy(x, TARGETS), ["all_reduce"], []),
        (lambda x: F.cross_entropy(x, TARGETS, reduction="none"), [], []),
        (lambda x: F.cross_entropy(x.T, torch.arange(7) % 6), ["all_reduce", "all_reduce"], []),
        (lambda x: x.softmax(0), ["all_gather"], ["all_reduce"]),
        (lambda x: x.softmax(1), [], []),
        (lambda x: x.log_softmax(0), ["all_gather"], ["all_reduce"]),
        (lambda x: x.cumsum(0), ["all_gather"], ["all_reduce"]),
        (lambda x: x.cumsum(1), [], []),
        (lambda x: F.cosine_similarity(x, x.detach() * 2, dim=0), ["all_reduce"], []),
    ],
    ids="mse mse-none ce ce-none ce-of-classes softmax softmax-whole log_softmax cumsum cumsum-whole cosine".split(),
)
def test_what_travels(function, forward, backward):
    def step(mesh):
        x = on(mesh, randn(6, 7), Shard(0))
        with comm.record() as there:
            y = function(x)
        local = y.to_local()
        with comm.record() as back:
            local.backward(torch.ones_like(local))
        return verbs(there), verbs(back)

    assert on_ranks(2, step) == [(forward, backward)] * 2


def test_softmax_sends_two_numbers_for_each_row():
    def step(mesh):
        x = on(mesh, randn(16, 5), Shard(0), (11, 5))
        with comm.record() as calls:
            x.softmax(0)
        return [call.bytes for call in calls]

    assert on_ranks(2, step) == [[2 * 2 * 5 * 8]] * 2  # of the result: two numbers of every rank


def test_targets_out_of_bounds_are_refused():
    def step(mesh):
        for sizes in [(5, 2), (0, 7)]:
            with pytest.raises(IndexError, match="targets range from 0 to 7, but dim 1 has 7 elements"):
                F.cross_entropy(on(mesh, randn(4, 7), Shard(1), sizes), torch.tensor([0, 3, 7, 1]))
        x = on(mesh, randn(4, 7), Shard(0))
        with pytest.raises(ValueError, match="must have shape"):
            F.cross_entropy(x, torch.tensor([0, 3]))
        with pytest.raises(ValueError, match="'median' is not one of none, mean, sum"):
            F.mse_loss(x, x, reduction="median")
        with pytest.raises(ValueError, match="they must be equal"):
            F.binary_cross_entropy(x.sigmoid(), torch.ones(7, dtype=torch.float64))
        with pytest.raises(IndexError, match="dim 2"):
            x.softmax(2)
        with promotion_mode("disabled"), pytest.raises(ValueError, match="plain tensor of shape"):
            F.cross_entropy(x, torch.tensor([0, 3, 6, 1]))

    on_ranks(2, step)


def test_old_reduction_arguments():
    x, y = randn(7, 3), randn(7, 3).cos()

    def step(mesh):
        given = on(mesh, x, Shard(0), (2, 5))
        assert_close(F.mse_loss(given, y, reduce=False).full_tensor(), F.mse_loss(x, y, reduction="none"), "none")
        assert_close(F.l1_loss(given, y, False).full_tensor(), F.l1_loss(x, y, reduction="sum"), "sum")

    on_ranks(2, step)


def test_all_targets_ignored():
    def step(mesh):
        loss = F.cross_entropy(on(mesh, randn(4, 7), Shard(0), (1, 3)), torch.full((4,), -100))
        assert loss.full_tensor().isnan()

    on_ranks(2, step)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.unfold(0, 1, 1),
        lambda x: F.cosine_similarity(x, x.detach() * -2, dim=0),
        lambda x: F.multi_margin_loss(x, torch.tensor(0), reduction="none"),
        lambda x: x.gather(0, torch.tensor(0)),
        lambda x: torch.linalg.vander(x, N=3),
    ],
    ids=["unfold", "cosine_similarity", "multi_margin_loss", "gather", "vander"],
)
def test_a_tensor_without_dims(function):
    def step(mesh):
        y = function(on(mesh, torch.tensor(3.0), Replicate()))
        y.sum().backward()
        return y.full_tensor()

    expected = function(torch.tensor(3.0))
    for y in on_ranks(2, step):
        assert y.shape == expected.shape and torch.equal(y, expected)


@pytest.mark.each_value
@pytest.mark.parametrize("placement, sizes", [(Shard(0), (1, 5)), (Shard(1), (2, 5)), (Shard(1), (0, 7))], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        lambda x: F.cross_entropy(x, torch.tensor([3, -100, 0, 6, 2, -100]), label_smoothing=0.1),
        lambda x: F.cross_entropy(x, torch.tensor([3, -100, 0, 6, 2, -100])),
        lambda x: F.mse_loss(x, x.detach().cos()),
        lambda x: F.log_softmax(x, 1).square().sum(),
        lambda x: x.cumprod(1).square().mean(),
        lambda x: F.cosine_similarity(x, x.detach().cos()).square().sum(),
    ],
    ids="smooth cross_entropy mse log_softmax cumprod cosine".split(),
)
def test_double_backward(loss, placement, sizes):
    def second(x):
        (grad,) = torch.autograd.grad(loss(x), x, create_graph=True)
        (grad,) = torch.autograd.grad(grad.square().sum(), x)
        return grad

    x = randn(6, 7)
    expected = second(x.clone().requires_grad_())

    def step(mesh):
        assert_close(second(on(mesh, x, placement, sizes)).full_tensor(), expected, "second gradient")

    on_ranks(2, step)


# --- defects of other packages, by name


def test_mean_of_a_3_5_split_is_1_625():
    """DTensor: 1.5, silently: the mean of the ranks' means."""

    def step(mesh):
        local = torch.full((3,), 1.0) if mesh.get_rank() == 0 else torch.full((5,), 2.0)
        return ShardTensor.from_local(local, mesh, [Shard(0)]).mean().item()

    assert on_ranks(2, step) == [1.625] * 2


@pytest.mark.parametrize("rows", [8, 7])
def test_mse_loss_mean_and_its_gradient(rows):
    """DTensor: the gradient times the world size, silently; for 7 rows the value is wrong too."""
    x, y = randn(rows, 3).requires_grad_(), randn(rows, 3).cos()
    expected = F.mse_loss(x, y)
    expected.backward()

    def step(mesh):
        given = on(mesh, x.detach(), Shard(0))
        loss = F.mse_loss(given, on(mesh, y, Shard(0)))
        loss.backward()
        assert_close(loss.full_tensor().detach(), expected.detach(), "value")
        assert_close(given.grad.full_tensor(), x.grad, "gradient")

    on_ranks(2, step)


def test_softmax_and_var_of_splits_that_are_no_chunks():
    """physicsnemo: wrong, or collectives that do not match."""
    x = randn(16, 3)

    def step(mesh):
        given = on(mesh, x, Shard(0), (9, 7))
        with comm.record() as calls:
            y, spread = given.softmax(0), given.var(0)
        assert max(call.bytes for call in calls) <= 2 * 2 * 3 * 8  # and never the tensor, as DTensor gathers it
        assert_close(y.full_tensor().detach(), x.softmax(0), "softmax")
        assert_close(spread.full_tensor().detach(), x.var(0), "var")

    on_ranks(2, step)

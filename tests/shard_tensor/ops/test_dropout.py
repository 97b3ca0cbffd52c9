"""Dropout and random numbers: any layout gives the values of one process, and gradients have the same mask."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist.shard_tensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor, distribute_tensor
from tests.shard_tensor.sharding import Foreign
from tests.shard_tensor.support.cases import assert_close, on_ranks
from tests.support.pool import processes


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def on(mesh, x, placement, sizes=None):
    return distribute_tensor(x.clone().requires_grad_(), mesh, [placement], sizes=[sizes], src=None)


def seeded(function):
    torch.manual_seed(7)
    return function()


LAYOUTS = [(Shard(0), (1, 5)), (Shard(1), (2, 2)), (Shard(2), (0, 7)), (Replicate(), None)]
FUNCTIONS = {
    "dropout": F.dropout,
    "torch.dropout": lambda x: torch.dropout(x, 0.3, train=True),
    "all": lambda x: F.dropout(x, 1.0),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.4),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.4),
    "dropout3d of one volume": lambda x: F.dropout3d(x.unsqueeze(-1), 0.4),
    "dropout1d of one sample": lambda x: F.dropout1d(x, 0.4),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "module": nn.Dropout(0.25),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_of_one_process(name):
    function, x = FUNCTIONS[name], randn(6, 4) if "one sample" in name else randn(6, 4, 7)
    torch.manual_seed(7)
    given = x.clone().requires_grad_()
    expected = function(given)
    expected.backward(expected.detach().cos())
    assert (expected == 0).any() or "alpha" in name

    def step(mesh):
        for placement, sizes in LAYOUTS if x.dim() == 3 else LAYOUTS[:2]:
            own = on(mesh, x, placement, sizes)
            y = seeded(lambda own=own: function(own))
            assert_close(y.full_tensor().detach(), expected.detach(), f"{name}, {placement}")
            y.backward(expected.detach().cos())
            assert_close(own.grad.full_tensor(), given.grad, f"gradient of {name}, {placement}")

    on_ranks(2, step)


def test_in_eval_it_is_the_identity():
    def step(mesh):
        x = on(mesh, randn(6, 4), Shard(0), (1, 5))
        module = nn.Dropout(0.5).eval()
        assert module(x) is x
        assert F.dropout(x, 0.5, training=False) is x
        assert F.alpha_dropout(x, 0.5) is x
        assert F.dropout(x, 0.0) is x
        with pytest.raises(ValueError, match=r"between 0 and 1, but got 1\.5"):
            F.dropout(x, 1.5)

    on_ranks(2, step)


def test_random_numbers_in_place():
    fills = {
        "uniform": lambda x: x.uniform_(-1, 2),
        "normal": lambda x: x.normal_(1, 3),
        "bernoulli": lambda x: x.bernoulli_(0.3),
        "exponential": lambda x: x.exponential_(2),
        "init": nn.init.uniform_,
        "of fans": nn.init.kaiming_uniform_,
    }

    def step(mesh):
        for placement, sizes in [(Shard(0), (1, 5)), (Shard(1), (3, 1)), (Replicate(), None)]:
            for name, fill in fills.items():
                x = distribute_tensor(randn(6, 4), mesh, [placement], sizes=[sizes], src=None)
                x.requires_grad_(name in ("init", "of fans"))
                assert seeded(lambda x=x, fill=fill: fill(x)) is x
                expected = randn(6, 4)
                seeded(lambda fill=fill, expected=expected: fill(expected))
                assert_close(x.full_tensor().detach(), expected, name)

    on_ranks(2, step)


def test_random_numbers_in_place_of_a_partial_and_of_a_result():
    def step(mesh):
        summands = ShardTensor.from_local(randn(6, 4), mesh, [Partial()], sharding_shapes="chunk")
        for fill in (lambda x: x.normal_(), nn.init.uniform_):
            with pytest.raises(ValueError, match=r"in place on .*Partial.*redistribute"):
                fill(summands)
        assert_close(summands.full_tensor(), randn(6, 4) * 2, "it is as it was")
        x = on(mesh, randn(6, 4), Shard(0), (1, 5))
        y = x * 2
        seeded(lambda: y.uniform_())
        (Foreign.apply(y).sum() + x.sum()).backward()
        assert_close(x.grad.full_tensor(), torch.ones(6, 4, dtype=torch.float64), "nothing of what was overwritten")

    on_ranks(2, step)


def on_processes():
    mesh = DeviceMesh("cpu", [0, 1])
    x = randn(6, 7)
    for placement, sizes in [(Shard(0), (1, 5)), (Shard(1), (2, 5)), (Replicate(), None)]:
        for function in (
            F.dropout,
            lambda x: F.gumbel_softmax(x, 0.5),
            lambda x: F.gumbel_softmax(x, 0.5, hard=True, dim=0),
        ):
            torch.manual_seed(7)
            expected = function(x)
            given = on(mesh, x, placement, sizes)
            torch.manual_seed(7)
            y = function(given)
            assert_close(y.full_tensor().detach(), expected, f"{function} on {placement}")
            y.sum().backward()
    torch.manual_seed(7)
    expected = F.dropout(x)
    torch.manual_seed(7)
    given = ShardTensor.from_local(x * (0.25, 0.75)[mesh.get_rank()], mesh, [Partial()], sharding_shapes="chunk")
    assert_close(F.dropout(given).full_tensor(), expected, "of a Partial")


@pytest.mark.process
def test_random_streams_on_processes():
    processes(2).run(on_processes, mesh={})

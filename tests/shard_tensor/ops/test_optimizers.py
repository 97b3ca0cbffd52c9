"""Optimizers, clipping and gradient scaling on ShardTensor parameters, against the same in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from neuronx_dist.shard_tensor import Shard, ShardTensor, distribute_module, distribute_tensor
from tests.shard_tensor.support.cases import assert_close, on_ranks

OPTIMIZERS = {
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True, amsgrad=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, 0.1, fused=True),
}


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


PLAIN = model()
X = torch.linspace(-1, 1, 8 * 3, dtype=torch.float64).view(8, 3)


def split(name, module, mesh):
    if isinstance(module, nn.Linear):
        n = module.weight.shape[1]
        weight = distribute_tensor(module.weight.detach(), mesh, [Shard(1)], sizes=[(1, n - 1)])
        module.weight = nn.Parameter(weight)


def twins(mesh):
    module, twin = copy.deepcopy(PLAIN), copy.deepcopy(PLAIN)
    distribute_module(module, mesh, split)
    assert all(param.is_leaf for param in module.parameters())
    return module, twin, distribute_tensor(X, mesh, [Shard(0)], sizes=[(7, 1)], src=None)


def assert_equal(module, twin, gradients=False):
    for (name, own), expected in zip(module.named_parameters(), twin.parameters()):
        if gradients:
            assert own.grad._spec is own._spec
            assert_close(own.grad.full_tensor(), expected.grad, f"gradient of {name}")
        else:
            assert_close(own.full_tensor().detach(), expected.detach(), name)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps(name):
    def train(mesh):
        module, twin, x = twins(mesh)
        optimizers = [OPTIMIZERS[name](each.parameters()) for each in (module, twin)]
        for _ in range(3):
            for each, optimizer, data in zip((module, twin), optimizers, (x, X)):
                optimizer.zero_grad()
                each(data).square().mean().backward()
                optimizer.step()
        assert_equal(module, twin)

    on_ranks(2, train)


@pytest.mark.parametrize("foreach", [False, True])
def test_clip_grad_norm(foreach):
    def clip(mesh):
        module, twin, x = twins(mesh)
        norms = []
        for each, data in ((module, x), (twin, X)):
            each(data).square().mean().backward()
            norms.append(nn.utils.clip_grad_norm_(each.parameters(), 0.01, foreach=foreach))
        assert isinstance(norms[0], ShardTensor)
        assert_close(norms[0].full_tensor(), norms[1], "norm")
        assert_equal(module, twin, gradients=True)

    on_ranks(2, clip)


@pytest.mark.parametrize("finite", [True, False])
def test_grad_scaler(finite):
    """An infinite gradient of one rank's shard makes all ranks leave the step out."""

    def scaled(mesh):
        module, twin, x = twins(mesh)
        for each, data in ((module, x), (twin, X)):
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            optimizer = torch.optim.AdamW(each.parameters(), 0.1)
            scaler.scale(each(data).square().mean()).backward()
            if not finite:
                grad = each[0].weight.grad
                if each is twin:
                    grad[0, 0] = torch.inf
                elif mesh.get_rank() == 0:
                    grad.to_local()[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (8.0 if finite else 4.0)
        assert_equal(module, twin)
        if not finite:
            assert_equal(module, PLAIN)

    on_ranks(2, scaled)


def test_a_gradient_that_lies_elsewhere_is_refused():
    def step(mesh):
        module, _, x = twins(mesh)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, fused=True)
        module(x).square().mean().backward()
        optimizer.step()
        state = optimizer.state[module[0].weight]
        state["momentum_buffer"] = state["momentum_buffer"].redistribute()
        with pytest.raises(ValueError, match="create the optimizer after distributing the parameters"):
            optimizer.step()

    on_ranks(2, step)

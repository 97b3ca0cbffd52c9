"""Optimizers that ZeRO-1 accepts: a class, a partial of one, a function; and its errors for all else."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from tests.optimizer.zero1_training import train, weights_of
from tests.support.synthetic import Model

ADAM: dict[str, Any] = dict(lr=0.05, betas=(0.8, 0.9))
FACTORIES: dict[str, Any] = {
    "partial": functools.partial(torch.optim.AdamW, **ADAM),
    "partial of a partial": functools.partial(functools.partial(torch.optim.AdamW, lr=0.05), betas=(0.8, 0.9)),
    "function": lambda params: torch.optim.AdamW(params, **ADAM),
}


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


@pytest.mark.parametrize("wrapper", [NeuronZero1Optimizer, MasterWeightsOptimizer])
@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_trains_as_its_class(name: str, wrapper: Any) -> None:
    def rank_main(factory: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        model = Model()
        groups = [dict(params=[model.norm], weight_decay=0.0), dict(params=[model.column, model.row], lr=0.3)]
        optimizer = wrapper(groups, factory, **options)
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.3]
        optimizer.add_param_group(dict(params=[model.scalar]))
        assert optimizer.param_groups[2]["lr"] == 0.05
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, last=1)
        scheduler.step()
        train(model, optimizer, first=1, last=2)
        return weights_of(model)

    mesh = Mesh(2)
    by_class = comm.threads.run(mesh, rank_main, torch.optim.AdamW, ADAM)
    for values, expected in zip(comm.threads.run(mesh, rank_main, FACTORIES[name], {}), by_class):
        assert all(torch.equal(values[key], expected[key]) for key in expected)


@pytest.mark.parametrize("wrapper", [NeuronZero1Optimizer, MasterWeightsOptimizer])
@pytest.mark.parametrize(
    "optimizer,call",
    [
        (lambda p: torch.optim.AdamW([p], lr=0.01), "torch.optim.AdamW, lr=0.01"),
        (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9), "torch.optim.SGD, lr=0.1, momentum=0.9"),
        (lambda p: torch.optim.Adam([{"params": [p], "lr": 0.5}]), "torch.optim.Adam, lr=0.5"),
    ],
)
def test_an_optimizer_that_is_made_already_is_refused_with_the_call_to_write(
    optimizer: Any, call: str, wrapper: Any
) -> None:
    def rank_main() -> None:
        param = weight()
        name = wrapper.__name__
        with pytest.raises(TypeError, match=rf"{name} creates its .*{re.escape(f'{name}(params, {call})')}"):
            wrapper([param], optimizer(param))
        with pytest.raises(TypeError, match=re.escape(f"{name}(params, {call})")):
            wrapper(optimizer(param), torch.optim.AdamW)

    comm.threads.run(Mesh(1), rank_main)


@pytest.mark.parametrize("wrapper", [NeuronZero1Optimizer, MasterWeightsOptimizer])
def test_a_module_in_place_of_parameters_is_refused(wrapper: Any) -> None:
    with comm.as_rank(Mesh(1), 0), pytest.raises(TypeError, match="got a Linear, a module, .* pass model.parameters()"):
        wrapper(torch.nn.Linear(2, 2), torch.optim.AdamW)


@pytest.mark.parametrize(
    "factory,error,message",
    [
        ("AdamW", TypeError, "optimizer_class is 'AdamW'; pass a class such as torch.optim.AdamW"),
        ([*range(1000)], TypeError, r"optimizer_class is \[0, 1, 2, 3, 4, 5, \.\.\.\]; pass a class"),
        (lambda params: params, TypeError, "returned a list, not a torch optimizer"),
        (lambda params: torch.optim.SGD([weight()], lr=1.0), ValueError, "returned SGD with other parameters"),
        (lambda groups: torch.optim.LBFGS(groups[0]["params"]), ValueError, "LBFGS cannot work on shards"),
        (functools.partial(torch.optim.LBFGS, lr=1.0), ValueError, "LBFGS cannot work on shards"),
    ],
    ids=[
        "name",
        "parameters",
        "no optimizer",
        "other parameters",
        "function, not elementwise",
        "partial, not elementwise",
    ],
)
def test_what_makes_no_optimizer_of_shards_is_refused(factory: Any, error: type[Exception], message: str) -> None:
    def rank_main() -> None:
        with pytest.raises(error, match=message):
            NeuronZero1Optimizer([weight()], factory)

    comm.threads.run(Mesh(2), rank_main)


def test_names_of_nxd() -> None:
    from neuronx_dist.optimizer import AdamW_FP32OptimParams, MasterWeightsOptimizer, zero_redundancy_optimizer

    assert zero_redundancy_optimizer.NeuronZero1Optimizer is NeuronZero1Optimizer
    assert issubclass(zero_redundancy_optimizer.NeuronEPZero1Optimizer, NeuronZero1Optimizer)

    def rank_main() -> None:
        param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        with pytest.raises(
            ValueError, match=r"parameter of torch.bfloat16.*MasterWeightsOptimizer\(params, AdamW_FP32"
        ):
            AdamW_FP32OptimParams([param], lr=0.1)
        for wrapper in (MasterWeightsOptimizer, NeuronZero1Optimizer):
            optimizer = wrapper([param], AdamW_FP32OptimParams, lr=0.1, grad_clipping=False)
            param.grad = torch.ones_like(param)
            optimizer.step()
            state = next(iter(optimizer.base_optimizer.state.values()))
            assert state["exp_avg"].dtype == optimizer.shards[0].master.dtype == torch.float32

    comm.threads.run(Mesh(2), rank_main)


@pytest.mark.parametrize("wrapper", [NeuronZero1Optimizer, MasterWeightsOptimizer])
def test_defaults_of_adamw_of_fp32_masters_are_upstreams(wrapper: Any) -> None:
    """No weight decay, eps 1e-6: torch's are 0.01 and 1e-8."""
    from neuronx_dist.optimizer import AdamW_FP32OptimParams

    def rank_main(factory: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
        model = Model()
        with torch.no_grad():
            model.norm.mul_(1e-6)  # gradients near eps
        optimizer = wrapper(model.parameters(), factory, lr=0.05, **options)
        train(model, optimizer, last=2)
        return weights_of(model)

    mesh = Mesh(2)
    expected = comm.threads.run(mesh, rank_main, torch.optim.AdamW, dict(weight_decay=0.0, eps=1e-6))
    upstream: dict[str, Any] = dict(correct_bias=True, no_deprecation_warning=False)
    for options in ({}, upstream):
        for values, whole in zip(comm.threads.run(mesh, rank_main, AdamW_FP32OptimParams, options), expected):
            assert all(torch.equal(values[key], whole[key]) for key in whole)
    for factory, options in ((torch.optim.AdamW, {}), (AdamW_FP32OptimParams, dict(weight_decay=0.01))):
        for values, whole in zip(comm.threads.run(mesh, rank_main, factory, options), expected):
            assert any(not torch.equal(values[key], whole[key]) for key in whole)
    with pytest.raises(NotImplementedError, match="correct_bias=False"):
        AdamW_FP32OptimParams([weight()], correct_bias=False)

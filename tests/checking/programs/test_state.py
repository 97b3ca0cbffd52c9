"""Tensors that `model_fn` makes beside the parameters: they follow them into the check, with their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd

MESH = {"dp": 2, "tp": 2}
Step = Callable[[nn.Module, Any, torch.Tensor], None]


class Net(nn.Module):
    """A feed-forward layer over tp; `make(self)` adds state to it."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(8, 16, gather_output=False)
        self.down = nxd.RowParallelLinear(16, 8, input_is_parallel=True)
        self.state = make(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


class Accumulator:
    """State of a user's class."""

    def __init__(self, params: Any) -> None:
        self.sums = {param: torch.zeros_like(param, dtype=torch.float64) for param in params}

    def add(self) -> None:
        for param, total in self.sums.items():
            total += param.grad


def mean_over_dp(x: torch.Tensor) -> torch.Tensor:
    return comm.all_reduce(x, "dp") / comm.size("dp")


def main_grads(net: Any) -> None:
    for param in net.parameters():
        param.main_grad = torch.zeros_like(param)


def add_to_main_grads(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    for part in x.chunk(2):
        (model(part) / 2).backward()
        for param in model.parameters():
            param.main_grad += param.grad
            param.grad = None
    for param in model.parameters():
        param.grad = mean_over_dp(param.main_grad)
    optimizer.step()


def by_parameter(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    for param in model.parameters():
        model.state[param] += param.grad
        param.grad = mean_over_dp(model.state[param])
    optimizer.step()


def of_a_class(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    model.state.add()
    for param, total in model.state.sums.items():
        param.grad = mean_over_dp(total).to(param.dtype)
    optimizer.step()


def averages(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    nxd.reduce_gradients(model)
    optimizer.step()
    with torch.no_grad():
        for name, param in model.named_parameters():
            model.state[name].mul_(0.9).add_(param, alpha=0.1)


def masked(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    nxd.reduce_gradients(model)
    optimizer.step()
    with torch.no_grad():
        model.up.weight.mul_(model.state[0])


def by_a_closure(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    nxd.reduce_gradients(model)
    model.state()
    optimizer.step()


def closure(net: Any) -> Callable[[], None]:
    velocity = {param: torch.zeros_like(param) for param in net.parameters()}

    def add() -> None:
        for param in velocity:
            velocity[param].mul_(0.9).add_(param.grad)
            param.grad = velocity[param]

    return add


RIGHT: dict[str, tuple[Callable[[Any], Any], Step]] = {
    "main_grad": (main_grads, add_to_main_grads),
    "by parameter": (lambda net: {param: torch.zeros_like(param) for param in net.parameters()}, by_parameter),
    "of a class": (lambda net: Accumulator(net.parameters()), of_a_class),
    "moving averages": (lambda net: {n: p.detach().clone() for n, p in net.named_parameters()}, averages),
    "a mask": (lambda net: (torch.ones_like(net.up.weight),), masked),
    "a closure": (closure, by_a_closure),
}


@pytest.mark.each_value
@pytest.mark.parametrize("level", ["G", "L"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_steps_pass(name: str, level: str) -> None:
    make, step = RIGHT[name]
    report = spmd.check(lambda: Net(make), torch.zeros(4, 8), MESH, step=step, level=level)
    assert report.ok, report


def not_reduced(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    for param in model.parameters():
        param.grad = param.main_grad.add_(param.grad)
    optimizer.step()


def reduced_where_the_optimizer_does_not_read(model: Any, optimizer: Any, x: torch.Tensor) -> None:
    model(x).backward()
    for param in model.parameters():
        param.main_grad.copy_(mean_over_dp(param.grad))
    optimizer.step()


@pytest.mark.parametrize("step", [not_reduced, reduced_where_the_optimizer_does_not_read])
def test_a_gradient_that_the_optimizer_reads_and_nobody_reduced(step: Step) -> None:
    (problem,) = spmd.check(lambda: Net(main_grads), torch.zeros(4, 8), MESH, step=step).problems
    assert "SGD.step: the gradient of up.weight" in problem.message and "the parts are not added up" in problem.message


def test_state_of_a_model_that_existed_before_is_left_as_it_is() -> None:
    with comm.as_rank(nxd.Mesh(4, tp=2), 0):
        net = Net(closure)
    (cell,) = net.state.__closure__
    before = dict(cell.cell_contents)
    spmd.check(lambda: net, torch.zeros(4, 8), MESH)
    assert cell.cell_contents.keys() == before.keys() == {*net.parameters()}
    assert all(value is before[key] and type(value) is torch.Tensor for key, value in cell.cell_contents.items())

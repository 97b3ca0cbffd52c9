"""`torch.compile` of functions and modules that get ShardTensors gives the results of eager ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from neuronx_dist import distributed
from neuronx_dist.shard_tensor import Shard, ShardTensor, distribute_tensor
from neuronx_dist.shard_tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.shard_tensor.support.cases import assert_close
from tests.support.pool import processes

pytestmark = [pytest.mark.process, pytest.mark.slow]


def whole() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 7 * 3, dtype=torch.float64).view(4, 7, 3)


def function(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x) * 2
    return (y @ y.transpose(-1, -2)).sum(0)


def with_plain_work(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    w = torch.sin(w) * 2  # compiled
    return (x * w).mean()


def compiled() -> None:
    mesh = distributed.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    module = torch.compile(twin, backend="eager")
    xx = whole().requires_grad_()
    twin(xx).square().mean().backward()
    expected = [param.grad for param in twin.parameters()]
    twin.zero_grad()
    x = distributed.distribute_tensor(whole().requires_grad_(), mesh, [Shard(1)], sizes=[(5, 2)])
    module(x).square().mean().backward()
    assert_close(x.grad.full_tensor(), xx.grad, "gradient of the input")
    for param, grad in zip(twin.parameters(), expected, strict=True):
        assert_close(param.grad, grad, "gradient of a weight")
    result = torch.compile(function, backend="eager")(x)
    assert result._spec is function(x)._spec
    assert_close(result.full_tensor().detach(), function(xx).detach(), "function")
    w = torch.linspace(1, 2, 3, dtype=torch.float64).requires_grad_()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    loss = torch.compile(with_plain_work, backend=backend)(x, w)
    loss.backward()
    (grad,) = torch.autograd.grad(with_plain_work(whole(), w), w)
    assert_close(w.grad, grad, "gradient of a plain operand")
    assert graphs, "what lies between ShardTensors is compiled"
    local = torch.compile(lambda x: x.to_local() + 1, backend="eager")(x)
    assert_close(local.detach(), x.to_local().detach() + 1, "to_local")
    whole_again = torch.compile(lambda x: x.redistribute(placements=[Shard(0)]).full_tensor(), backend="eager")(x)
    assert_close(whole_again.detach(), whole(), "redistribute")

    def of_meshes(x):  # a mesh is an object of torch's class, of which dynamo takes some members alone
        y = distribute_tensor(x, mesh, [Shard(0)]) * mesh.size()
        return ShardTensor.from_local(y.to_local(), mesh, [Shard(0)]).full_tensor()

    plain = torch.arange(8.0).view(4, 2)
    assert_close(torch.compile(of_meshes, backend="eager")(plain), plain * mesh.size(), "meshes")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).double()
    ones = torch.ones(2, 4, dtype=torch.float64)
    expected = model(ones).detach()
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    assert_close(torch.compile(model, backend="eager")(ones).detach(), expected, "styles")


def calls(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Handlers of four kinds, and plain work between them."""
    y = torch.transpose(torch.tanh(x), 0, 1)
    w = torch.sin(w) * 2  # compiled
    return torch.sum(F.linear(y, w))


def with_an_operator(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x) * 2
    w = torch.sin(w) * 2  # in the frame of a break at an operator, behind it: not compiled
    return torch.sum(F.linear(y, w))


def breaks(function: Callable[..., torch.Tensor]) -> tuple[int, int]:
    """Numbers of breaks of the graph, and of graphs; the result is the eager one."""
    mesh = distributed.init_device_mesh("cpu", (2,))
    x = distribute_tensor(whole(), mesh, [Shard(1)], sizes=[(5, 2)])
    w = torch.linspace(1, 2, 6, dtype=torch.float64).view(2, 3)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    counters.clear()
    y = torch.compile(function, backend=backend)(x, w)
    assert_close(y.to_local(), function(whole(), w), "result")
    with pytest.raises(Unsupported, match=r"ShardTensor.__torch_function__.*leave fullgraph=True out"):
        torch.compile(function, backend="eager", fullgraph=True)(x, w)
    return sum(counters["graph_break"].values()), len(graphs)


def test_each_call_is_a_break_and_fullgraph_is_refused():
    assert processes(2).run(counted_breaks, mesh={}) == [((4, 1), (1, 0))] * 2


def counted_breaks() -> tuple[tuple[int, int], tuple[int, int]]:
    return breaks(calls), breaks(with_an_operator)


def test_compiled_functions_and_modules():
    processes(2).run(compiled, mesh={})

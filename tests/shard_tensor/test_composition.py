"""A 2-D mesh, data x domain, in processes: the wrappers and optimizers of data parallelism, and tensor parallelism.

Every model is trained as a twin in one process is, on all the data: the weights after the steps are equal.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module as distribute_dtensors
from torch.nn.parallel import DistributedDataParallel

from neuronx_dist import distributed
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, ShardTensor, distribute_module, distribute_tensor
from tests.shard_tensor.support.cases import assert_close
from tests.support.pool import processes

pytestmark = pytest.mark.process

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.1),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def whole() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 7 * 3, dtype=torch.float64).view(4, 7, 3)


def grid() -> DeviceMesh:
    return distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))


def own_input(data_rank: int, domain: DeviceMesh) -> ShardTensor:
    return distribute_tensor(whole().chunk(2)[data_rank].contiguous(), domain, [Shard(1)], sizes=[(5, 2)])


def split_rows(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        rows = module.weight.shape[0]
        weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0)], sizes=[(1, rows - 1)])
        module.weight = nn.Parameter(weight)


def value(x: torch.Tensor) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach()


def train(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, name: str) -> nn.Module:
    """Three steps of a module and of its twin in one process; returns the twin."""
    twin = model()
    other = OPTIMIZERS[name](twin.parameters())
    for step in range(3):
        for each, steps, data in ((module, optimizer, x), (twin, other, whole())):
            steps.zero_grad()
            each(data).square().mean().backward()
        if step == 0 and not isinstance(optimizer, NeuronZero1Optimizer) and name == "sgd":
            for (label, param), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
                if param.grad is not None and param.grad.shape == expected.grad.shape:
                    assert_close(value(param.grad), expected.grad, f"gradient of {label}")
        optimizer.step()
        other.step()
    return twin


def assert_twins(module: nn.Module, twin: nn.Module) -> None:
    for (name, param), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert_close(value(param), expected.detach(), name)


def wrapped(wrapper: str, name: str) -> None:
    mesh = grid()
    domain, data = mesh["domain"], mesh.to_torch()["data"]
    module: nn.Module = model()
    if wrapper == "ddp":
        module = DistributedDataParallel(module, process_group=data.get_group())
    elif wrapper == "fsdp1":
        module = FullyShardedDataParallel(module, device_mesh=data, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        for layer in module:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=data)
        fully_shard(module, mesh=data)
    x = own_input(mesh.get_local_rank("data"), domain)
    twin = train(module, OPTIMIZERS[name](module.parameters()), x, name)
    if wrapper == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(module):
            assert_twins(module, twin)
    else:
        assert_twins(module, twin)


@pytest.mark.each_value
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard", "fsdp1"])
def test_data_parallel_wrappers(wrapper, name):
    processes(4).run(wrapped, wrapper, name, mesh={})


def beside_dtensors(wrapper: str) -> None:
    """Torch's `distribute_module` replicates parameters over domain, as PhysicsNeMo's scripts do; inputs are ours."""
    mesh = grid()
    module: nn.Module = distribute_dtensors(model(), mesh["domain"])
    if wrapper == "fully_shard":
        fully_shard(module, mesh=mesh["data"])
    elif wrapper != "none":
        module = FullyShardedDataParallel(
            module, device_mesh=mesh["data"], use_orig_params=wrapper == "fsdp1", device_id=torch.device("cpu")
        )
    everything = distribute_tensor(whole(), mesh["domain"], [Shard(1)], sizes=[(5, 2)])
    x = everything if wrapper == "none" else own_input(mesh.get_local_rank("data"), mesh["domain"])
    twin = train(module, OPTIMIZERS["adamw"](module.parameters()), x, "adamw")
    if wrapper.startswith("fsdp1"):
        with FullyShardedDataParallel.summon_full_params(module):
            assert_twins(module, twin)
    else:
        assert_twins(module, twin)


@pytest.mark.parametrize("wrapper", ["none", "fully_shard", "fsdp1", "fsdp1, flat"])
def test_dtensors_beside_shard_tensors(wrapper):
    processes(4).run(beside_dtensors, wrapper, mesh={})


def zero1(parameters: str, name: str) -> None:
    if parameters == "sharded":  # over ranks that are no data-parallel ones
        mesh = DeviceMesh.from_axes(("dp", "tp"))
        data_rank, domain = mesh.get_local_rank("dp"), mesh["tp"]
    else:
        mesh = grid()
        data_rank, domain = mesh.get_local_rank("data"), mesh["domain"]
    module = model()
    if parameters != "plain":
        distribute_module(module, domain, split_rows if parameters == "sharded" else None)
    optimizer = NeuronZero1Optimizer(module.parameters(), OPTIMIZERS[name], grad_clipping=False)
    assert_twins(module, train(module, optimizer, own_input(data_rank, domain), name))


@pytest.mark.each_value
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("parameters", ["plain", "replicated", "sharded"])
def test_zero1(parameters, name):
    processes(4).run(zero1, parameters, name, mesh=dict(tp=2) if parameters == "sharded" else {})


def refused() -> None:
    mesh = grid()
    module = model()
    distribute_module(module, mesh["domain"], split_rows)
    with pytest.raises(ValueError, match="over ranks .* a mesh that shards it over none of the data-parallel"):
        NeuronZero1Optimizer(module.parameters(), torch.optim.SGD, lr=0.1, grad_clipping=False)


def test_zero1_refuses_parameters_that_are_sharded_over_its_own_ranks():
    processes(4).run(refused, mesh={})


def tensor_parallel(name: str) -> None:
    """Three dims: data x domain x tensor. Four processes: one data rank."""
    mesh = distributed.init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "domain", "tensor"))
    both = mesh["domain", "tensor"]
    module = model()

    def split(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(layer, nn.Linear):
            dim = 0 if name == "0" else 1  # columns, then rows
            n = layer.weight.shape[dim]
            weight = distribute_tensor(layer.weight.detach(), mesh, [Replicate(), Shard(dim)], sizes=[None, (1, n - 1)])
            layer.weight = nn.Parameter(weight)

    distribute_module(module, both, split)
    x = distribute_tensor(whole(), both, [Shard(1), Replicate()], sizes=[(5, 2), None])
    assert module(x).placements[0] == Shard(1)
    optimizer = OPTIMIZERS[name](module.parameters())
    assert_twins(module, train(module, optimizer, x, name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tensor_parallel_weights_with_domain_activations(name):
    processes(4).run(tensor_parallel, name, mesh={})

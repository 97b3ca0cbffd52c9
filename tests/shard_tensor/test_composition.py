"""A 2-D mesh, data x domain, in processes: torch's data-parallel wrappers around modules that get ShardTensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from neuronx_dist import distributed
from neuronx_dist.shard_tensor import Replicate, Shard
from tests.shard_tensor.support.cases import assert_close
from tests.support.pool import processes

pytestmark = pytest.mark.process


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def whole() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * 7 * 3, dtype=torch.float64).view(4, 7, 3)


def step(wrapper: str) -> None:
    mesh = distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "domain"))
    domain, data = mesh["domain"], mesh.to_torch()["data"]
    twin = model()
    twin(whole()).square().mean().backward()
    module = model()
    if wrapper == "ddp":
        module = DistributedDataParallel(module, process_group=data.get_group())
    else:
        for layer in module:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=data)
        fully_shard(module, mesh=data)
    own = whole().chunk(2)[mesh.get_local_rank("data")]
    x = distributed.distribute_tensor(own.contiguous(), domain, [Shard(1)], sizes=[(5, 2)])
    module(x).square().mean().backward()
    for (name, param), expected in zip(module.named_parameters(), twin.parameters()):
        grad = param.grad if wrapper == "ddp" else param.grad.full_tensor()
        assert_close(grad, expected.grad, f"{wrapper}: {name}")
    assert x.placements != (Replicate(),)


@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard"])
def test_data_parallel_wrappers(wrapper):
    processes(4).run(step, wrapper, mesh={})

"""Meshes of this package where torch's functions take one: wrappers, DTensors, slices of one root."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import distribute_tensor as distribute_dtensor
from torch.nn.parallel import DistributedDataParallel

from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, ShardTensor, init_device_mesh
from tests.shard_tensor.support.cases import assert_close, on_ranks
from tests.support.pool import processes

pytestmark = pytest.mark.process


def whole(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def dtensors() -> None:
    mesh = grid()
    assert isinstance(mesh, TorchMesh) and mesh == mesh.to_torch() and mesh.to_torch() == mesh
    assert mesh["dp"] != mesh["tp"].to_torch()
    x = distribute_dtensor(whole(4, 6), mesh, [Shard(0), Shard(1)])
    assert x.device_mesh is mesh
    y = x.redistribute(placements=[Replicate(), Shard(0)])
    assert_close(y.full_tensor(), whole(4, 6), "redistributed")
    assert ShardTensor.from_dtensor(x).device_mesh is mesh
    tp = mesh["tp"]
    local = TorchDTensor.from_local(whole(2, 3), tp, [Shard(0)])
    product = distribute_dtensor(whole(5, 4), tp, [Replicate()]) @ local
    assert_close(product.full_tensor(), whole(5, 4) @ whole(2, 3).repeat(2, 1), "product")
    mixed = local + TorchDTensor.from_local(whole(2, 3), tp.to_torch(), [Shard(0)])  # equal meshes
    assert_close(mixed.to_local(), whole(2, 3) * 2, "sum")


def wrapped(wrapper: str) -> None:
    mesh = grid()
    dp = mesh["dp"]
    module: nn.Module = model()
    if wrapper == "ddp":
        module = DistributedDataParallel(module, device_mesh=dp)
    elif wrapper == "hsdp":
        fully_shard(module, mesh=mesh)
    else:
        fully_shard(module[0], mesh=dp)
        fully_shard(module, mesh=dp)
    twin = model()
    x = whole(4, 3)
    part = x if wrapper == "hsdp" else x.chunk(2)[dp.get_local_rank()]
    for one, inputs in ((module, part), (twin, x)):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        one(inputs).square().mean().backward()
        optimizer.step()
    for param, expected in zip(module.parameters(), twin.parameters(), strict=True):
        value = param.full_tensor() if isinstance(param, TorchDTensor) else param
        assert_close(value.detach(), expected.detach(), "parameter")


def tensor_and_data_parallel() -> None:
    """DTensors over one dim, in `fully_shard` over another: torch asks whether both are parts of one mesh."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = grid()
    module = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(module, mesh=mesh["dp"])
    twin = model()
    module(whole(4, 3).chunk(2)[mesh.get_local_rank("dp")]).square().mean().backward()
    twin(whole(4, 3)).square().mean().backward()
    for param, expected in zip(module.parameters(), twin.parameters(), strict=True):
        assert_close(param.grad.full_tensor(), expected.grad, "gradient")


def test_what_a_notebook_asks_makes_no_mesh_of_torch():
    """All ranks would have to take part."""

    def rank(mesh):
        assert not hasattr(mesh, "_repr_html_") and not hasattr(mesh, "_ipython_display_")
        assert "torch" not in mesh.tables

    on_ranks(2, rank)


def test_dtensors():
    processes(4).run(dtensors, mesh={})


@pytest.mark.parametrize("wrapper", ["ddp", "fully_shard", "hsdp"])
def test_wrappers(wrapper):
    processes(4).run(wrapped, wrapper, mesh={})


@pytest.mark.skipif(not hasattr(TorchMesh, "_get_root_mesh"), reason="torch 2.9 looks for parts of a mesh in a table")
def test_tensor_and_data_parallel():
    processes(4).run(tensor_and_data_parallel, mesh={})

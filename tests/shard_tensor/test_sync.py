"""Equal parameters on all ranks of a mesh, and what is found out if they are not."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import nn

from neuronx_dist.shard_tensor import DeviceMesh, Replicate, Shard, distribute_tensor, sync, sync_module_over_mesh
from tests.shard_tensor.support.cases import assert_close, on_ranks


def test_sync_module_over_mesh():
    def run(mesh):
        module = nn.Linear(3, 2).double()
        with torch.no_grad():
            for param in module.parameters():
                param.fill_(mesh.get_rank() + 1)
        sync_module_over_mesh(module, mesh, src_mesh_rank=2)
        for param in module.parameters():
            assert param.detach().eq(3).all()

    on_ranks(4, run, (2, 2))


@pytest.mark.parametrize("own_mesh", [False, True])
def test_sync_of_parameters_that_one_mesh_dim_shards(own_mesh):
    """Shards come over the other mesh dim, and stay different over the one that shards them."""

    def run(mesh):
        mesh = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("data", "domain"))
        whole = torch.arange(7.0).view(7, 1)
        placements = [Shard(0)] if own_mesh else [Replicate(), Shard(0)]
        module = nn.Module()
        over = mesh["domain"] if own_mesh else mesh
        weight = distribute_tensor(whole, over, placements, sizes=[*[None] * (not own_mesh), (5, 2)], src=None)
        module.weight = nn.Parameter(weight)
        with torch.no_grad():
            module.weight.mul_(mesh.get_local_rank("data") + 1)
        sync_module_over_mesh(module, mesh, src_mesh_rank=2)  # of the second row
        assert_close(module.weight.full_tensor().detach(), whole * 2, "weight")

    on_ranks(4, run, (2, 2))


def test_ranks_are_compared_first():
    def run(mesh):
        rank = mesh.get_rank()
        module = nn.Linear(2, 2).double()
        with torch.no_grad():
            module.weight.fill_(rank)
            module.bias.fill_(math.nan if rank == 0 else 5.0)
        sync_module_over_mesh(module, mesh, verify=True)
        assert module.weight.unique().tolist() == [0] and module.bias.isnan().all()
        with pytest.raises(RuntimeError, match=r"weight differs across the mesh: \('weight', \(\d, 2\), .* on rank"):
            sync_module_over_mesh(nn.Linear(2, 2 + rank), mesh, verify=True)
        with pytest.raises(RuntimeError, match=r"bias differs across the mesh: .* (here|rank \d)"):
            sync_module_over_mesh(nn.Linear(2, 2, bias=rank == 0), mesh, verify=True)

    on_ranks(2, run)


def test_values_are_compared_afterwards():
    def run(mesh):
        module = nn.Linear(1, 1, bias=False)
        module.weight.data.fill_(mesh.get_rank())
        with pytest.raises(RuntimeError, match=r"weight differs across the mesh: .*(0.0, 0.0|1.0, 1.0).\) here"):
            sync_module_over_mesh(module, mesh, verify=True)
        sync_module_over_mesh(module, mesh)

    with mock.patch.object(sync.comm, "broadcast", lambda x, group, src: x):
        on_ranks(2, run)


def test_dtensors_are_left_as_they_are():
    """A DTensor is imitated by its class: parameters are of it, buffers are not."""

    def run(mesh):
        rank = mesh.get_rank()
        module = nn.Linear(2, 2)
        module.register_buffer("scale", torch.tensor(float(rank)))
        module.weight.data.fill_(rank)
        sync_module_over_mesh(module, mesh)
        assert module.scale == 0 and module.weight.unique().tolist() == [rank]
        with pytest.raises(RuntimeError, match="every parameter is a DTensor, .* call it before fully_shard"):
            sync_module_over_mesh(nn.Linear(2, 2), mesh)
        sync_module_over_mesh(nn.ReLU(), mesh)

    with mock.patch.object(sync, "DTensor", nn.Parameter):
        on_ranks(2, run)


def test_ranks_whose_groups_agree_raise_too():
    """On a grid of 2 x 2 rank 2 differs, of which ranks 0 and 1 learn by another mesh dim."""

    def rank(mesh):
        module = nn.Linear(3 if mesh.get_rank() == 2 else 2, 2)
        with pytest.raises(RuntimeError, match="weight differs across the mesh"):
            sync_module_over_mesh(module, mesh, verify=True)

    on_ranks(4, rank, (2, 2))

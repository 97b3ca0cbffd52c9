"""`DistributedManager` as PhysicsNeMo's scripts use it; ranks are threads, processes in tests/examples."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, DistributedManager, Shard, ShardTensor


def test_it_says_which_rank_this_is_and_makes_the_mesh():
    def run():
        DistributedManager.initialize()
        DistributedManager.initialize()  # the second one changes nothing
        manager = DistributedManager()
        assert manager.mesh is DeviceMesh("cpu", [0, 1, 2, 3])
        mesh = manager.initialize_mesh((2, -1), ["data", "domain"])
        assert manager.mesh is mesh is DistributedManager().mesh and mesh.shape == (2, 2)
        assert manager.distributed and manager.device == torch.device("cpu")
        x = ShardTensor.from_local(torch.ones(3), manager.mesh["domain"], (Shard(0),))
        assert x.shape == (6,)
        return manager.rank, manager.world_size

    assert threads.run(Mesh(4), run) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_local_rank_is_the_launcher_s(monkeypatch):
    with comm.as_rank(Mesh(4), 2):
        DistributedManager.initialize()
        assert DistributedManager().local_rank == 0
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert (DistributedManager().rank, DistributedManager().local_rank) == (2, 1)


def test_refusals():
    assert not DistributedManager.is_initialized()
    with pytest.raises(RuntimeError, match=r"call DistributedManager.initialize\(\) first"):
        DistributedManager()
    with comm.as_rank(Mesh(4), 0):
        DistributedManager.initialize()
        with pytest.raises(ValueError, match=r"mesh_shape \(2, 2\) has 2 dims, but mesh_dim_names \('domain',\) has 1"):
            DistributedManager().initialize_mesh((2, 2), ("domain",))
        with pytest.raises(ValueError, match="does not fit 4 ranks"):
            DistributedManager().initialize_mesh((3,), ("domain",))

"""`DistributedManager` as PhysicsNeMo's scripts use it; ranks are threads, processes in tests/examples."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, DistributedManager, Shard, ShardTensor
from neuronx_dist.shard_tensor.manager import UndefinedGroupError, UninitializedManagerError


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


def test_groups_by_name():
    """Groups of 8 ranks: pairs, the ranks that have one index in their pairs, and quartets of these halved."""

    def run():
        DistributedManager.initialize()
        DistributedManager.create_process_subgroup("model", 2)
        DistributedManager.create_orthogonal_process_group("data", "model")
        DistributedManager.create_process_subgroup("half", 2, group_name="data")
        manager = DistributedManager()
        assert manager.group_names == ["model", "data", "half"] and manager.group() is None
        assert (manager.group_size(), manager.group_rank(), manager.group_name()) == (8, manager.rank, None)
        assert all(manager.group_name(manager.group(name)) == name for name in manager.group_names)
        ranks = {name: comm.gather_objects(manager.rank, manager.group(name)) for name in manager.group_names}
        assert [manager.group_size(name) for name in manager.group_names] == [2, 4, 2]
        assert [manager.group_rank(name) for name in ranks] == [rows.index(manager.rank) for rows in ranks.values()]
        return ranks

    results = threads.run(Mesh(8), run)
    assert [r["model"] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [r["data"] for r in results] == [[0, 2, 4, 6], [1, 3, 5, 7]] * 4
    assert [r["half"] for r in results] == [[0, 2], [1, 3]] * 2 + [[4, 6], [5, 7]] * 2


def test_the_mesh_by_physicsnemo_s_names():
    def run():
        DistributedManager.initialize()
        manager = DistributedManager()
        assert manager.mesh_dims == {} and manager.mesh_names() == []
        assert manager.global_mesh.mesh_dim_names == ("world",) and manager.global_mesh is manager.mesh
        mesh = manager.initialize_mesh((2, -1), ("data", "domain"))
        assert manager.global_mesh is mesh and manager.mesh_dims == {"data": 2, "domain": 2}
        assert (manager.mesh_names(), manager.mesh_sizes()) == (["data", "domain"], [2, 2])
        assert manager.get_mesh_group(mesh["domain"]) is mesh.communicator("domain")
        assert manager.group("data") is mesh.communicator("data") and manager.group_names == []
        assert (manager.group_size("domain"), manager.group_rank("domain")) == (2, manager.rank % 2)
        DistributedManager.create_orthogonal_process_group("across", "domain")
        assert [*manager.group("across").ranks] == [manager.rank % 2, manager.rank % 2 + 2]
        DistributedManager.create_process_subgroup("alone", 1, "data")
        assert [*manager.group("alone").ranks] == [manager.rank]
        assert manager.get_mesh_group(mesh) is manager.get_mesh_group(mesh)
        return comm.gather_objects(manager.rank, manager.get_mesh_group(mesh))

    assert threads.run(Mesh(4), run) == [[0, 1, 2, 3]] * 4


def test_a_manager_is_left_and_its_settings_are_those_of_all_instances():
    with comm.as_rank(Mesh(4), 2):
        DistributedManager.initialize()
        manager, other = DistributedManager(), DistributedManager()
        assert not (manager.broadcast_buffers or manager.find_unused_parameters or manager.cuda)
        manager.broadcast_buffers = manager.find_unused_parameters = True
        assert other.broadcast_buffers and other.find_unused_parameters
        assert str(other) == "rank 2 of 4, started by None, on cpu"
        DistributedManager.cleanup()
        assert not DistributedManager.is_initialized() and comm.current().rank == 2
        DistributedManager.initialize()
        assert not DistributedManager().broadcast_buffers
    assert DistributedManager.get_available_backend() == ("nccl" if torch.cuda.is_available() else "gloo")


def test_refusals():
    assert not DistributedManager.is_initialized()
    with pytest.raises(UninitializedManagerError, match=r"call DistributedManager.initialize\(\) first"):
        DistributedManager()
    with pytest.raises(ValueError, match=r"backend 'smoke' is not one of .*gloo.*nccl"):
        DistributedManager.setup(backend="smoke")
    with comm.as_rank(Mesh(4), 0):
        DistributedManager.initialize()
        with pytest.raises(ValueError, match=r"mesh_shape \(2, 2\) has 2 dims, but mesh_dim_names \('domain',\) has 1"):
            DistributedManager().initialize_mesh((2, 2), ("domain",))
        with pytest.raises(ValueError, match="does not fit 4 ranks"):
            DistributedManager().initialize_mesh((3,), ("domain",))
        with pytest.raises(UndefinedGroupError, match=r"no group 'model' was made: the groups are \[\]"):
            DistributedManager().group("model")
        with pytest.raises(UndefinedGroupError, match="no group 'model'"):
            DistributedManager.create_orthogonal_process_group("data", "model")
        with pytest.raises(ValueError, match="create_process_subgroup 'model': size 3 does not divide 4 ranks"):
            DistributedManager.create_process_subgroup("model", 3)
        DistributedManager.create_process_subgroup("model", 2)
        with pytest.raises(ValueError, match="group 'model' exists already"):
            DistributedManager.create_process_subgroup("model", 2)
        with pytest.raises(UndefinedGroupError, match=r"is none of the groups \['model'\]"):
            DistributedManager().group_name(object())

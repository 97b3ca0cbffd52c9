"""NxD's parallel_state: every getter against explicit numbers, what is refused, and that destroying destroys."""

from __future__ import annotations

import inspect
import os

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import comm
from neuronx_dist.comm import launch
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import model_groups
from neuronx_dist.parallel_layers import parallel_state as ps
from tests.support.pool import processes

MESH = Mesh(16, tp=2, pp=2, cp=2, ep=4)  # dp 2, edp 1

# of rank 13: pp 1, dp 0? row-major (pp, dp, cp, tp) of (2, 2, 2, 2): 13 = 1*8 + 1*4 + 0*2 + 1
RANK = 13
NUMBERS = {
    "tensor_model_parallel": (2, 1),
    "pipeline_model_parallel": (2, 1),
    "data_parallel": (2, 1),
    "context_model_parallel": (2, 0),
    "expert_model_parallel": (4, 2),
    "expert_data_parallel": (1, 0),
}
GROUPS = {
    "tensor_model_parallel": [[i, i + 1] for i in range(0, 16, 2)],
    "pipeline_model_parallel": [[i, i + 8] for i in range(8)],
    "data_parallel": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "context_model_parallel": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
    "expert_model_parallel": [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]],
    "expert_data_parallel": [[i] for i in range(16)],
}


@pytest.mark.parametrize("name", NUMBERS)
def test_sizes_ranks_and_groups(name):
    with comm.as_rank(MESH, RANK):
        assert (getattr(ps, f"get_{name}_size")(), getattr(ps, f"get_{name}_rank")()) == NUMBERS[name]
        assert getattr(ps, f"get_{name}_group")(as_list=True) == GROUPS[name]
        assert getattr(ps, f"get_{name}_replica_groups")() == GROUPS[name]
        group = getattr(ps, f"get_{name}_group")()
        assert list(group.ranks) == next(g for g in GROUPS[name] if RANK in g)


def test_other_getters():
    with comm.as_rank(MESH, RANK):
        assert ps.model_parallel_is_initialized() and ps.get_mesh() == MESH and ps.get_rank() == RANK
        assert ps.get_world_group(as_list=True) == [list(range(16))]
        assert ps.get_zero1_sharding_groups() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
        assert ps.get_data_parallel_src_rank() == 9
        assert ps.get_pipeline_model_parallel_next_rank() == 5  # wraps around
        assert ps.get_pipeline_model_parallel_prev_rank() == 5
        assert not ps.is_global_rank_zero()
        assert ps.rmsg("text") == "[rank_13_pp1_tp1_dp1_cp0] text"
        assert ps.get_rank_info_str() == "rank_13_pp1_tp1_dp1_cp0"
        assert ps.rmsg_ep("text") == "[rank_13_pp1_tp1_ep2_edp0] text"
        assert ps.get_expert_parallel_rank_from_global_rank(13) == 2
        assert ps.get_expert_parallel_rank_from_global_rank(13, [9, 11, 13, 15]) == 2
        assert ps.gather_python_object("x", "tp") == ["x", "x"]
    with comm.as_rank(Mesh(6, pp=3, tp=2), 3):
        assert (ps.get_pipeline_model_parallel_prev_rank(), ps.get_pipeline_model_parallel_next_rank()) == (1, 5)
    with comm.as_rank(Mesh(8, tp=2, cp=4), 0):
        assert ps.is_global_rank_zero()
        pairs = [(0, 2), (2, 4), (4, 6), (6, 0), (1, 3), (3, 5), (5, 7), (7, 1)]
        assert ps.get_context_model_parallel_src_tgt_pairs() == pairs


def test_b10_source_rank_of_a_tensor_parallel_group():
    """Upstream B10: rank 2 of [0, 2, 4, 6] answers 2."""
    for rank in range(8):
        with comm.as_rank(Mesh(8, tp=4), rank):
            assert ps.get_tensor_model_parallel_src_rank() == rank // 4 * 4
    with comm.as_rank(Mesh(8, cp=2), 6):  # a group with a stride
        assert ps.get_data_parallel_src_rank() == 0
    for rank in range(8):  # that very group
        with comm.as_rank(Mesh(8, tp=4, topology="trn1", ranks_per_node=8), rank):
            assert ps.get_tensor_model_parallel_src_rank() == rank % 2


def test_neighbours_and_sources_follow_the_topology():
    mesh = Mesh(64, tp=32, pp=2, topology="trn2")
    for rank, tp_source, neighbour in [(0, 0, 16), (16, 16, 0), (48, 0, 32), (32, 16, 48)]:
        with comm.as_rank(mesh, rank):
            assert ps.get_tensor_model_parallel_src_rank() == tp_source
            assert ps.get_pipeline_model_parallel_next_rank() == neighbour
            assert ps.get_pipeline_model_parallel_prev_rank() == neighbour
            assert ps.get_pipeline_model_parallel_rank() == (rank in (16, 32))
    with comm.as_rank(Mesh(128, tp=32, topology="trn2"), 112):  # dp 4: 48, 32, 112, 96
        assert ps.get_data_parallel_src_rank() == 48 and ps.get_data_parallel_rank() == 2
    with comm.as_rank(Mesh(32, tp=4, topology="trn1"), 9):
        ps.initialize_kv_group(2)
        assert ps.get_kv_shared_group(as_list=True)[:4] == [[0, 16], [8, 24], [1, 17], [9, 25]]


def test_pairs_of_neighbouring_stages():
    mesh = Mesh(8, pp=4, tp=2)
    even, odd = [[0, 2], [4, 6], [1, 3], [5, 7]], [[2, 4], [6, 0], [3, 5], [7, 1]]
    for rank, after, before in [(0, (0, 2), (0, 6)), (3, (3, 5), (1, 3)), (6, (0, 6), (4, 6))]:
        with comm.as_rank(mesh, rank):
            assert ps.get_pipeline_model_parallel_sr_group(0) == even
            assert ps.get_pipeline_model_parallel_sr_group(True) == odd
            assert sorted(ps.get_pipeline_model_parallel_sr_group()) == sorted(even + odd)
            assert ps.get_next_rank_group(as_list=True) == (odd if rank in (2, 3, 6, 7) else even)
            assert ps.get_prev_rank_group(as_list=True) == (even if rank in (2, 3, 6, 7) else odd)
            assert ps.get_next_rank_replica_groups() == ps.get_next_rank_group(as_list=True)
            assert ps.get_prev_rank_replica_groups() == ps.get_prev_rank_group(as_list=True)
            assert ps.get_next_rank_group().ranks == after and ps.get_prev_rank_group().ranks == before
    with comm.as_rank(Mesh(3, pp=3), 0):  # an odd number of stages: the last is even, as the first
        assert [2, 0] in ps.get_prev_rank_group(as_list=True) and ps.get_prev_rank_group().ranks == (0, 2)
    with comm.as_rank(Mesh(2), 0), pytest.raises(ValueError, match="one stage"):
        ps.get_next_rank_group()


def test_experts_of_a_rank():
    assert ps.get_experts_for_expert_parallel_rank(1, 8, 4) == [2, 3]
    assert ps.get_experts_for_expert_parallel_rank(1, 4, 2, [[0, 3], [1, 2]]) == [1, 2]
    with pytest.raises(ValueError, match="7 experts.*size 2"):
        ps.get_experts_for_expert_parallel_rank(0, 7, 2)


def test_groups_that_a_model_asks_for():
    with comm.as_rank(Mesh(16, tp=4), 5):
        for getter in (ps.get_token_shuffle_group, ps.get_kv_shared_group):
            with pytest.raises(RuntimeError, match="call initialize_"):
                getter()
        ps.initialize_token_shuffle_group(2)
        assert ps.get_token_shuffle_group(as_list=True)[:2] == [[0, 4], [8, 12]]
        assert ps.get_token_shuffle_group().ranks == (1, 5)
        assert ps.get_token_shuffle_replica_groups() == ps.get_token_shuffle_group(as_list=True)
        assert ps.get_token_shuffle_group_size() == 2
        ps.initialize_token_shuffle_group(2)  # again, the same: fine
        with pytest.raises(ValueError, match="size 2, of adjacent ranks; all layers"):
            ps.initialize_token_shuffle_group(4)
        with pytest.raises(ValueError, match="3 does not divide.*4"):
            ps.initialize_token_shuffle_group(3)
        ps.destroy_token_shuffle_group()
        ps.initialize_token_shuffle_group(4)
        ps.initialize_kv_group(2)
        assert ps.get_kv_shared_group(as_list=True)[:3] == [[0, 2], [1, 3], [4, 6]]
        ps.destroy_kv_group()
        ps.initialize_kv_group(2, sequential_ranks_in_group=True)
        assert ps.get_kv_shared_group(as_list=True)[:3] == [[0, 1], [2, 3], [4, 5]]
        assert ps.get_kv_shared_replica_groups() == ps.get_kv_shared_group(as_list=True)
        assert ps.get_kv_shared_group_size() == 2
        with pytest.raises(ValueError, match="8 does not divide.*4"):
            ps.initialize_kv_group(8)


def test_a_group_over_pipeline_stages():
    for rank, ranks in [(0, (0, 6)), (7, (1, 7)), (2, None)]:
        with comm.as_rank(Mesh(8, pp=4, tp=2), rank):
            group = ps.create_pg_with_ranks([0, 3])
            assert (group.ranks if group is not None else None) == ranks


def test_groups_are_forgotten_without_a_mesh() -> None:
    """Scripts forget the mesh first, and these groups after it."""
    ps.destroy_kv_group()
    ps.destroy_token_shuffle_group()


def test_every_getter_says_what_to_call_before_there_is_a_mesh():
    getters = [
        function
        for name, function in (*vars(ps).items(), *vars(model_groups).items())
        if name.startswith("get_") and inspect.isfunction(function) and name != "get_experts_for_expert_parallel_rank"
        if function.__module__ in (ps.__name__, model_groups.__name__)
    ]
    assert len(getters) > 35
    for getter in getters:
        needed = [p for p in inspect.signature(getter).parameters.values() if p.default is inspect.Parameter.empty]
        with pytest.raises(RuntimeError, match="initialize_model_parallel"):
            getter(*[0] * len(needed))
    assert not ps.model_parallel_is_initialized()
    ps.destroy_model_parallel()
    os.environ["RANK"] = "3"
    try:
        assert ps.rmsg("early") == "[rank_3] early"
    finally:
        del os.environ["RANK"]


def test_initialising_without_torch_distributed_says_what_to_call():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ps.initialize_model_parallel()


def test_replica_groups_without_process_groups(monkeypatch):
    monkeypatch.setattr(launch, "world", lambda: (16, RANK))
    groups = ps.initialize_model_parallel(2, 2, 2, 4, mesh_only=True)
    axes = dict(tp="tensor", dp="data", pp="pipeline", ep_model="expert", ep_data="expert_data", cp="context")
    for field, name in axes.items():
        name = next(group for group in GROUPS if group in (f"{name}_model_parallel", f"{name}_parallel"))
        assert getattr(groups, f"{field}_groups") == GROUPS[name], field
    assert not ps.model_parallel_is_initialized()
    sized = ps.initialize_model_parallel(8, mesh_only=True)
    assert sized.tp_groups == [[*range(8)], [*range(8, 16)]] and len(sized.pp_groups) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert ps.initialize_model_parallel(4, mesh_only=True).tp_groups[0] == [0, 1, 2, 3]
    assert ps.initialize_model_parallel(4, mesh_only=True, topology="trn1").tp_groups[0] == [0, 4, 8, 12]


# --- on real processes ---


def refused():
    for sizes, parts in [
        (dict(tensor_model_parallel_size=4), ["world size 2", "tp=4"]),  # not clamped to 2
        (dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), ["tp=2", "pp=2", "4"]),
        (dict(expert_model_parallel_size=3), ["expert data", "ep=3"]),
        (dict(context_parallel_size=0), ["cp", "0"]),
    ]:
        with pytest.raises(ValueError) as error:
            ps.initialize_model_parallel(**sizes)
        assert all(part in str(error.value) for part in parts), str(error.value)
        assert not ps.model_parallel_is_initialized()
    with pytest.raises(ValueError, match="'trn1' is for whole nodes of 32 ranks"):
        ps.initialize_model_parallel(topology="trn1")
    groups = ps.initialize_model_parallel(tensor_model_parallel_size=2, mesh_only=True)
    assert groups.tp_groups == [[0, 1]] and groups.dp_groups == [[0], [1]] and groups.pp_groups == [[0], [1]]
    assert groups.ep_data_groups == [[0], [1]] and not ps.model_parallel_is_initialized()


def test_sizes_that_do_not_divide_raise():
    processes(2).run(refused, initialize=False)


def again_and_again():
    """Layout after layout in one process: groups work, the old ones are gone, and nothing is left in the end."""
    rank, seen = dist.get_rank(), []
    for sizes in [dict(tp=2), dict(pp=2), dict(tp=2, pp=2), dict(cp=2, ep=2), dict(tp=4), {}, dict(tp=2), dict(tp=2)]:
        for lazy in (False, True):
            names = dict(tp="tensor_model", pp="pipeline_model", cp="context", ep="expert_model")
            arguments = {f"{names[axis]}_parallel_size": size for axis, size in sizes.items()}
            ps.initialize_model_parallel(**arguments, skip_collective_init=lazy)
            mesh, before = Mesh(4, **sizes), comm.current()
            ps.initialize_model_parallel(**arguments)  # as upstream: the same again is no error
            assert comm.current() is before and ps.get_mesh() == mesh
            other = {} if sizes else dict(tensor_model_parallel_size=2)
            with pytest.raises(RuntimeError, match="destroy_model_parallel") as error:
                ps.initialize_model_parallel(**other)
            assert f"{mesh}" in str(error.value) and f"{Mesh(4, tp=1 if sizes else 2)}" in str(error.value)
            assert comm.current() is before
            for axis in ("tp", "pp", "dp", "cp", "ep", "edp", ("dp", "cp"), "world"):
                found = comm.all_reduce(torch.tensor([2.0**rank]), axis).item()
                assert found == sum(2.0**other for other in mesh.group_of(axis, rank)), (sizes, axis)
            group = ps.get_tensor_model_parallel_group()
            assert isinstance(group, dist.ProcessGroup)  # also for one rank
            assert dist.get_process_group_ranks(group) == list(mesh.group_of("tp", rank))
            total = torch.tensor([1.0])
            dist.all_reduce(total, group=group)
            assert total.item() == mesh.tp
            assert ps.get_world_group(as_list=True) == [[0, 1, 2, 3]]
            assert isinstance(ps.get_world_group(), dist.ProcessGroup)
            ps.destroy_model_parallel()
            ps.destroy_model_parallel()  # twice is fine
            assert not ps.model_parallel_is_initialized()
            seen.append(len(dist.distributed_c10d._world.pg_map))
            assert group is dist.group.WORLD or group not in dist.distributed_c10d._world.pg_map
    return seen


def test_destroying_destroys_and_another_layout_can_follow():
    assert processes(4).run(again_and_again, initialize=False) == [[1] * 16] * 4


def models_groups():
    ps.initialize_token_shuffle_group(2)
    ps.initialize_kv_group(2)
    shuffle, kv = ps.get_token_shuffle_group(), ps.get_kv_shared_group()
    assert isinstance(shuffle, dist.ProcessGroup) and isinstance(kv, dist.ProcessGroup)
    found = dist.get_process_group_ranks(shuffle), dist.get_process_group_ranks(kv)
    ps.destroy_token_shuffle_group()
    ps.destroy_kv_group()
    return found


def test_groups_that_a_model_asks_for_are_process_groups():
    found = processes(4).run(models_groups, mesh=dict(tp=2))
    assert found == [([0, 2], [0, 1]), ([1, 3], [0, 1]), ([0, 2], [2, 3]), ([1, 3], [2, 3])]

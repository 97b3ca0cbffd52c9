"""Groups whose ranks do not ascend: results come in the order of the group, on every backend, whatever torch sorts."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import parallel_state as ps
from tests.support.pool import processes

TRN2 = dict(topology="trn2", ranks_per_node=4)
MESHES = [Mesh(4, tp=2, **TRN2), Mesh(4, tp=2, pp=2, **TRN2), Mesh(4, tp=2, cp=2, **TRN2), Mesh(4, tp=4, **TRN2)]
AXES = ["tp", "dp", "pp", "cp", ("dp", "cp"), ("pp", "tp"), ("tp", "pp"), ("dp", "tp"), "world"]


def every_verb(axis: Any) -> dict[str, Any]:
    """Results of each verb on this rank; values are numbers of ranks."""
    here = comm.communicator(axis)
    n, rank = here.size, comm.current().rank
    assert here.ranks[here.rank] == rank == here.global_rank
    assert here.rank == comm.rank(axis) == comm.current().mesh.coordinate(axis, rank)
    x = torch.tensor([100 * rank + i for i in range(n)])
    large = torch.full((1 << 18,), float(rank))  # all_gather takes another way with these
    found: dict[str, Any] = {
        "all_gather": comm.all_gather(x, axis),
        "large all_gather": comm.all_gather(large, axis)[:: 1 << 18],
        "all_reduce": comm.all_reduce(x, axis),
        "reduce_scatter": comm.reduce_scatter(x, axis),
        "all_to_all": comm.all_to_all(x, axis),
        "objects": comm.gather_objects(rank, axis),
    }
    for index in range(n):
        found[f"broadcast {index}"] = comm.broadcast(x, axis, src=index)
        found[f"broadcast_object {index}"] = comm.broadcast_object(rank, axis, src=index)
    found["permute"] = comm.permute(x, axis, [(i, (i + 1) % n) for i in range(n)])
    if n > 1:
        received = torch.empty_like(x)
        receiving = comm.recv(received, axis, src=(here.rank - 1) % n, async_op=True)
        comm.send(x, axis, dst=(here.rank + 1) % n)
        found["recv"] = receiving.wait()
    return {what: value.tolist() if isinstance(value, torch.Tensor) else value for what, value in found.items()}


def on_all_axes() -> dict[Any, dict[str, Any]]:
    return {axis: every_verb(axis) for axis in AXES}


def expected(mesh: Mesh, rank: int, axis: Any) -> dict[str, Any]:
    group = mesh.group_of(axis, rank)
    n, place = len(group), group.index(rank)
    values = [[100 * other + i for i in range(n)] for other in group]
    before = values[place - 1]
    found: dict[str, Any] = {
        "all_gather": [v for value in values for v in value],
        "large all_gather": [float(other) for other in group],
        "all_reduce": [sum(column) for column in zip(*values)],
        "reduce_scatter": [sum(value[place] for value in values)],
        "all_to_all": [value[place] for value in values],
        "objects": list(group),
        "permute": before,
    }
    for index, other in enumerate(group):
        found |= {f"broadcast {index}": values[index], f"broadcast_object {index}": other}
    return found | ({"recv": before} if n > 1 else {})


def initialized(mesh: Mesh) -> dict[Any, dict[str, Any]]:
    """Initialises model parallel as a script does; torchrun sets LOCAL_WORLD_SIZE."""
    os.environ["LOCAL_WORLD_SIZE"] = str(mesh.ranks_per_node)
    try:
        ps.initialize_model_parallel(mesh.tp, mesh.pp, mesh.cp, topology=mesh.topology)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    assert ps.get_mesh() == mesh
    for axis, getter in (("pp", ps.get_pipeline_model_parallel_group), ("dp", ps.get_data_parallel_group)):
        group, ranks = getter(), mesh.group_of(axis, dist.get_rank())
        assert dist.get_process_group_ranks(group) == list(ranks)  # torch agrees, for those that ask it
        assert dist.get_rank(group) == ranks.index(dist.get_rank())
    found = on_all_axes()
    if mesh.pp > 1:
        pair = torch.tensor([1 << dist.get_rank()])
        for getter, other in (
            (ps.get_next_rank_group, ps.get_pipeline_model_parallel_next_rank()),
            (ps.get_prev_rank_group, ps.get_pipeline_model_parallel_prev_rank()),
        ):
            total = comm.all_reduce(pair, getter())
            assert total.item() == 1 << dist.get_rank() | 1 << other
    return found


def check(mesh: Mesh, results: list[dict[Any, dict[str, Any]]]) -> None:
    for rank, axis in itertools.product(range(mesh.world_size), AXES):
        assert results[rank][axis] == expected(mesh, rank, axis), (rank, axis)


def test_these_groups_do_not_ascend():
    assert MESHES[0].groups("dp") == [[0, 1], [3, 2]] and MESHES[1].groups("pp") == [[0, 1], [3, 2]]
    assert MESHES[3].groups("tp") == [[0, 3, 1, 2]]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_results_are_in_group_order_on_threads(mesh):
    check(mesh, threads.run(mesh, on_all_axes))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_results_are_in_group_order_on_processes(mesh):
    check(mesh, processes(4).run(initialized, mesh, initialize=False))

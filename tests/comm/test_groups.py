"""The groups that verbs run over: merged axes, explicit ranks, process groups, and axes of one rank."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.comm.backends.shapes import ShapesBackend
from neuronx_dist.mesh import Mesh
from tests.support.pool import processes


def merged_axes() -> dict[object, float]:
    x = torch.tensor([2.0 ** comm.rank("world")], dtype=torch.float64)
    axes = ["tp", "pp", "dp", ("dp", "cp"), ("pp", "tp"), ("tp", "pp"), "world", ("edp", "ep"), ()]
    gathered = comm.all_gather(x, ("tp", "pp")).log2().long().tolist()
    assert gathered == list(comm.communicator(("tp", "pp")).ranks)
    return {axis: comm.all_reduce(x, axis).item() for axis in axes}


@pytest.mark.parametrize("mesh", [Mesh(4, tp=2, pp=2), Mesh(4, tp=2, cp=2), Mesh(4, tp=4), Mesh(4, pp=2, ep=2)])
def test_merged_axes(mesh):
    expected = [
        {
            axis: float(sum(2**other for other in mesh.group_of(axis, rank)))
            for axis in ["tp", "pp", "dp", ("dp", "cp"), ("pp", "tp"), ("tp", "pp"), "world", ("edp", "ep"), ()]
        }
        for rank in range(4)
    ]
    assert threads.run(mesh, merged_axes) == expected
    sizes = dict(tp=mesh.tp, pp=mesh.pp, cp=mesh.cp, ep=mesh.ep)
    assert processes(4).run(merged_axes, mesh=sizes) == expected


def axes_of_one_rank() -> None:
    x = torch.arange(4.0)
    with comm.record(waits=True) as calls:
        assert comm.all_reduce(x, "pp") is x
        assert comm.all_reduce(x, "pp", async_op=True).wait() is x
        assert comm.all_gather(x, "pp") is x
        assert comm.reduce_scatter(x, "pp") is x
        assert comm.all_to_all(x, "pp") is x
        assert comm.broadcast(x, "pp") is x
        assert comm.permute(x, "pp", [(0, 0)]) is x
        assert torch.equal(comm.permute(x, "pp", []), torch.zeros(4))
        out = torch.empty(4)
        assert comm.all_reduce(x, "pp", out=out) is out and torch.equal(out, x)
        assert comm.gather_objects("here", "pp") == ["here"]
        assert comm.broadcast_object("here", "pp") == "here"
        comm.barrier("pp")
    assert not calls


def test_an_axis_of_one_rank_costs_nothing():
    threads.run(Mesh(2), axes_of_one_rank)
    processes(2).run(axes_of_one_rank)
    with comm.as_rank(Mesh(1), 0):
        axes_of_one_rank()


def explicit_groups() -> list[object]:
    found: list[object] = []
    rank = comm.rank("world")
    for lists in ([[0, 3], [1, 2]], [[3, 0]], [[1]], [[0, 3]]):
        group = comm.new_group(lists, "mine")
        assert (group is None) == all(rank not in ranks for ranks in lists)
        if group is None:
            found.append(None)
            continue
        assert group.axis == "mine" and group.ranks[group.rank] == rank == group.global_rank
        assert comm.communicator(group) is group and comm.size(group) == group.size and comm.rank(group) == group.rank
        found.append(comm.all_gather(torch.tensor([rank]), group).tolist())
    for lists in ([[0, 0]], [[0, 4]], [[0, 1], [1, 2]]):
        with pytest.raises(ValueError, match="disjoint lists of ranks below 4"):
            comm.new_group(lists)
    comm.barrier()
    return found


def test_new_group():
    expected = [
        [[0, 3], [3, 0], None, [0, 3]],
        [[1, 2], None, [1], None],
        [[1, 2], None, None, None],
        [[0, 3], [3, 0], None, [0, 3]],
    ]
    assert threads.run(Mesh(4, tp=2, pp=2), explicit_groups) == expected
    assert processes(4).run(explicit_groups, mesh=dict(tp=2, pp=2)) == expected


def a_users_process_group() -> None:
    import torch.distributed as dist

    rank = comm.rank("world")
    group = dist.new_group([1, 0])
    assert torch.equal(comm.all_reduce(torch.tensor([rank + 1.0]), group), torch.tensor([3.0]))
    order = list(comm.communicator(group).ranks)
    assert comm.all_gather(torch.tensor([rank]), group).tolist() == order
    assert comm.size(group) == 2 and comm.rank(group) == order.index(rank)
    with pytest.raises(TypeError, match="mesh axis name.*7"):
        comm.all_reduce(torch.ones(1), 7)
    dist.destroy_process_group(group)


def test_a_process_group_is_an_axis():
    processes(2).run(a_users_process_group)


ON_ONE_RANK = {
    "all_reduce": dict(op="max", reduce_dtype=torch.float64),
    "all_gather": dict(dim=1),
    "reduce_scatter": dict(dim=1),
    "all_to_all": dict(split_dim=1),
    "permute": dict(pairs=[(0, 0)]),
    "broadcast": dict(src=0),
}


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize("verb", ON_ONE_RANK)
def test_on_an_axis_of_one_rank_every_form_gives_the_input(verb, as_list):
    x, out = torch.arange(6.0).view(2, 3), torch.zeros(2, 3)
    if as_list and verb not in ("all_reduce", "all_gather", "reduce_scatter"):
        return
    with comm.as_rank(Mesh(2, tp=2), 0), comm.record() as calls:
        for asynchronous in (False, True):

            def call(asynchronous=asynchronous, **options):
                if as_list:
                    options = {key: [value] if key == "out" else value for key, value in options.items()}
                given = [x] if as_list else x
                result = getattr(comm, verb)(given, "pp", **ON_ONE_RANK[verb], async_op=asynchronous, **options)
                assert isinstance(result, comm.Handle) == asynchronous
                result = result.wait() if asynchronous else result
                return result[0] if as_list else result

            assert call() is x is call(out=x)
            assert call(out=out.zero_()) is out and torch.equal(out, x)
            leaf = torch.zeros(2, 3, requires_grad=True)
            assert call(out=leaf) is leaf and torch.equal(leaf, x) and leaf.is_leaf
    assert not calls


def test_sizes_and_ranks_of_axes_make_no_group():
    class Without(ShapesBackend):
        def communicator(self, label, groups, global_rank, separate=False):
            raise AssertionError(label)

    mesh = Mesh(16, tp=2, pp=2, cp=2)
    with comm.as_rank(mesh, 13, Without()):
        for axis in ("tp", "world", ("dp", "cp"), ()):
            assert (comm.size(axis), comm.rank(axis)) == (mesh.size(axis), mesh.coordinate(axis, 13))

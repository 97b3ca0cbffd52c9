"""`set_current_mesh`: a mesh under the user's names, its layouts, local axes, and other views of the same ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, MeshAxis, P, PartitionSpec, R, S, SpmdTypeError, V
from neuronx_dist.spmd.named_mesh import NamedMesh


@pytest.fixture
def world():
    """A group of 8 ranks of which this process is rank 5, and nobody else is there."""
    dist.init_process_group(backend="fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


def of(types, *shape):
    with spmd.no_typecheck():
        x = torch.ones(shape or (4, 4))
    return spmd.assert_type(x, types)


def test_axes_are_layouts():
    tp, dp = MeshAxis.of(2, 1), MeshAxis.of(4, 2)
    assert tp.isorthogonal(dp) and not MeshAxis.of(8, 1).isorthogonal(tp)
    assert not MeshAxis.of(3, 2).isorthogonal(MeshAxis.of(2, 5)), "no radix of one grid"
    assert (dp.size(), dp.offsets(), dp.coordinate(5)) == (4, [0, 2, 4, 6], 2)
    assert MeshAxis.of(1, 7) == MeshAxis.of(1, 1) != tp


def test_the_layout_of_a_group_is_read_off_its_ranks(world):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    assert MeshAxis.of(mesh.get_group("a")) == MeshAxis.of(2, 4)
    outer_and_inner = dist.new_group([0, 1, 4, 5])
    assert MeshAxis.of(outer_and_inner) == MeshAxis(((2, 4), (2, 1)))
    assert MeshAxis.of(dist.new_group([0, 1, 2, 3, 4, 5])) == MeshAxis.of(6, 1)
    with pytest.raises(ValueError, match="along no axis"):
        MeshAxis.of(dist.new_group([0, 1, 3, 5]))


@pytest.mark.parametrize("names", [("dp", "tp"), ("fsdp", "model"), ("tp", "dp")])
def test_a_device_mesh_under_any_names(world, names):
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
    outer, inner = names
    with spmd.set_current_mesh(mesh), spmd.SpmdTypeMode() as mode:
        assert isinstance(mode.mesh, NamedMesh) == (names != ("dp", "tp"))
        assert spmd.current_mesh_names() == {outer: MeshAxis.of(2, 4), inner: MeshAxis.of(4, 1)}
        assert comm.size(inner) == 4 and comm.rank(inner) == 1 and comm.size("pp") == comm.size("ep") == 1
        group = mesh.get_group(inner)
        x = of({outer: S(0), inner: S(1)})
        assert spmd.get_partition_spec(x) == PartitionSpec(outer, inner)
        assert spmd.get_axis_local_type(x, group) == S(1) == spmd.get_axis_local_type(x, MeshAxis.of(4, 1))
        y = torch.nn.functional.linear(x, of({outer: R, inner: S(1)}))
        assert spmd.get_axis_local_type(y, inner) is P
        for axis in (inner, group, MeshAxis.of(4, 1)):
            assert spmd.get_axis_local_type(spmd.all_reduce(y, axis, dst=I), inner) is I
        with pytest.raises(SpmdTypeError, match="added once for each rank|partial"):
            y + of({outer: S(0), inner: I})
    with pytest.raises(RuntimeError, match="not initialized"):
        comm.size(inner)


def test_values_on_a_mesh_of_the_users_names():
    def rank():
        me = comm.rank("world")
        with spmd.set_current_mesh({"outer": 2, "inner": 2}):
            x = torch.tensor([float(me)], requires_grad=True)
            y = spmd.all_reduce(x, "inner", dst=R) * 10 + spmd.all_reduce(x, "outer", dst=R)
            world = spmd.all_gather(x.detach(), ("outer", "inner"), src=S(0), dst=R)
            y.sum().backward()
        return y.item(), world.tolist(), x.grad.item()

    results = threads.run(Mesh(4, tp=4), rank)
    assert [y for y, _, _ in results] == [12.0, 14.0, 52.0, 54.0]
    assert all(world == [0.0, 1.0, 2.0, 3.0] and grad == 22.0 for _, world, grad in results)


def test_dims_that_two_axes_shard_have_the_order_of_the_mesh():
    with spmd.set_current_mesh({"z": 2, "a": 2, "m": 2}), spmd.SpmdTypeMode():
        x = spmd.assert_type(torch.randn(4, 4), {"m": R}, PartitionSpec(("z", "a"), None))
        assert spmd.get_partition_spec(x) == PartitionSpec(("z", "a"), None)
        inner = spmd.all_gather(x, "a", src=S(0), dst=R)
        assert spmd.get_axis_local_type(inner, "z") == S(0), "the inner axis first: what is left is S"
        outer = spmd.all_gather(x, "z", src=S(0), dst=R)
        assert spmd.get_axis_local_type(outer, "a") == S(0, stride=2), "the outer one first: blocks"
        with pytest.raises(SpmdTypeError, match="pieces in another order are V"):
            spmd.assert_type(torch.randn(4, 4), {"m": R}, PartitionSpec(("a", "z"), None))


def test_local_axes_have_local_types():
    def types(**options):
        with spmd.set_current_mesh({"dp": 2, "tp": 2}, **options), spmd.SpmdTypeMode():
            x, w = of({"dp": S(0), "tp": S(1)}), of({"dp": R, "tp": S(1)})
            y = torch.nn.functional.linear(x, w)
            return {axis: spmd.get_axis_local_type(y, axis) for axis in ("dp", "tp")}

    assert types() == {"dp": S(0), "tp": P}
    assert types(local_axes=("dp",)) == {"dp": V, "tp": P}
    with pytest.raises(ValueError, match="no axis of this mesh"):
        types(local_axes=("pp",))


def test_a_mesh_inside_of_a_check():
    with spmd.set_current_mesh({"dp": 4, "tp": 2}), spmd.SpmdTypeMode() as mode:
        outer = mode.mesh
        x = of({"dp": S(0), "tp": R})
        with spmd.set_current_mesh({"edp": 2, "ep": 2, "tp": 2}):
            y = spmd.reinterpret_mesh(x, spmd.current_mesh_names())
            assert spmd.get_local_type(y) == {"edp": S(0), "ep": S(0), "tp": R}
            assert spmd.get_axis_local_type(spmd.all_gather(y, "ep", src=S(0), dst=R), "edp") == S(0)
            with spmd.set_current_mesh(local_axes=("edp",)):
                assert spmd.get_axis_local_type(y * 2, "edp") is V
        assert mode.mesh is outer


def test_one_view_of_ranks_as_another():
    with spmd.set_current_mesh({"dp": 2, "cp": 2, "tp": 2}), spmd.SpmdTypeMode():
        flat = {"dp_cp": MeshAxis.of(4, 2), "tp": MeshAxis.of(2, 1)}
        x = of({"dp": V, "cp": V, "tp": I})
        merged = spmd.reinterpret_mesh(x, flat)
        assert spmd.get_local_type(merged) == {"dp_cp": V, "tp": I} and merged.data_ptr() == x.data_ptr()
        assert spmd.get_local_type(x) == {"dp": V, "cp": V, "tp": I}, "the other one keeps its type"
        with spmd.set_current_mesh(flat):
            again = spmd.reinterpret_mesh(merged, {"dp": MeshAxis.of(2, 4), "cp": MeshAxis.of(2, 2), "tp": flat["tp"]})
        assert spmd.get_local_type(again) == {"dp": V, "cp": V, "tp": I}
        with pytest.raises(SpmdTypeError, match="consists of parts"):
            spmd.reinterpret_mesh(of({"dp": R, "cp": V, "tp": I}), flat)


def test_what_is_no_mesh_is_refused():
    with (
        pytest.raises(SpmdTypeError, match="overlap"),
        spmd.set_current_mesh({"a": MeshAxis.of(4, 1), "b": MeshAxis.of(2, 2)}),
    ):
        pass
    with pytest.raises(RuntimeError, match="no current mesh"), spmd.set_current_mesh():
        pass
    assert spmd.current_mesh() is spmd.current_mesh_names() is None
    with pytest.raises(SpmdTypeError, match="no current mesh"):
        spmd.normalize_axis("tp")
    with pytest.raises(SpmdTypeError, match="no independent"):
        spmd.normalize_mesh(frozenset({MeshAxis.of(4, 1), MeshAxis.of(2, 2)}))

"""Names of torch's DTensor beside the styles: meshes merged and split, `local_map`, functions of layouts."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    compute_local_shape_and_global_offset,
    distribute_tensor,
    init_device_mesh,
    promotion_mode,
    report,
)
from neuronx_dist.shard_tensor.experimental import implicit_replication, local_map
from tests.shard_tensor.support.cases import assert_close, on_ranks
from tests.support.pool import processes


def whole(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


# --- meshes


def check_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    merged = mesh["dp", "cp"]._flatten("dp_cp")
    rank = mesh.get_rank()
    assert merged.mesh_dim_names == ("dp_cp",) and merged.mesh.tolist() == [rank % 2, 2 + rank % 2]
    assert mesh["dp_cp"] is merged and mesh["dp", "cp"]._flatten("dp_cp") is merged
    assert merged.get_local_rank() == mesh.get_local_rank("dp")
    world = mesh._flatten()
    assert world.mesh_dim_names == ("dp_cp_tp",) and world.mesh.tolist() == [0, 1, 2, 3]
    assert world._flatten("dp_cp_tp") is world and mesh["dp_cp_tp"] is world
    split = world._unflatten(0, (2, 2), ("a", "b"))
    assert split.mesh.tolist() == [[0, 1], [2, 3]] and split.mesh_dim_names == ("a", "b")
    assert mesh._unflatten("cp", (1, 1), ("c", "d")).shape == (2, 1, 1, 2)
    assert mesh.size("tp") == mesh.size(2) == 2 and mesh["dp", "tp"].shape == (2, 2)
    x = torch.full((2,), float(rank))
    for one in (merged, split["a"]):
        total = ShardTensor.from_local(x, one, [Partial()]).full_tensor()
        assert total.tolist() == [2.0 + 2 * (rank % 2)] * 2


def test_dims_are_merged_and_split():
    on_ranks(4, lambda mesh: check_meshes())


@pytest.mark.process
def test_dims_are_merged_and_split_in_processes():
    processes(4).run(check_meshes, mesh={})


# --- functions of local tensors


def test_local_map_of_a_product():
    """A sum over a contracted dim, whose parts differ in size; gradients too."""

    def run(mesh):
        w, x = whole(4, 7).requires_grad_(), whole(7, 3).requires_grad_()
        columns = distribute_tensor(w.detach(), mesh, [Shard(1)], sizes=[(5, 2)]).requires_grad_()
        rows = distribute_tensor(x.detach(), mesh, [Shard(0)], sizes=[(5, 2)]).requires_grad_()
        product = local_map(
            torch.mm, out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]), device_mesh=mesh
        )
        y = product(columns, rows)
        assert y.placements == (Partial(),)
        y.sin().sum().backward()
        (w @ x).sin().sum().backward()
        assert_close(y.full_tensor().detach(), (w @ x).detach(), "product")
        assert_close(columns.grad.full_tensor(), w.grad, "gradient of columns")
        assert_close(rows.grad.full_tensor(), x.grad, "gradient of rows")
        assert type(product(w, x)) is torch.Tensor  # without a ShardTensor it is the function

    on_ranks(2, run)


def test_local_map_of_several_results():
    def run(mesh):
        @local_map(out_placements=([Shard(0)], None, [Partial()]), in_grad_placements=([Shard(0)], [Partial()]))
        def parts(x, weight):
            return x * weight, "text", (x * weight).sum(0)

        x, weight = whole(5, 3).requires_grad_(), whole(3).requires_grad_()
        shards = distribute_tensor(x.detach(), mesh, [Shard(0)], sizes=[(4, 1)]).requires_grad_()
        replicated = distribute_tensor(weight.detach(), mesh, [Replicate()]).requires_grad_()
        y, text, total = parts(shards, replicated)
        assert text == "text" and y._spec.sizes == ((4, 1),)
        (y.sum() + total.sin().sum()).backward()
        ((x * weight).sum() + (x * weight).sum(0).sin().sum()).backward()
        assert_close(total.full_tensor().detach(), (x * weight).sum(0).detach(), "total")
        assert_close(shards.grad.full_tensor(), x.grad, "gradient of the shards")
        assert_close(replicated.grad.full_tensor(), weight.grad, "gradient of what is Partial there")

    on_ranks(2, run)


def test_the_gradient_of_a_local_tensor():
    """Partial: the gradients of the ranks add up to it, whatever uses the ShardTensor; else each rank has all of it."""

    def run(mesh):
        weight = distribute_tensor(whole(4, 3), mesh, [Shard(0)])
        x = whole(2, 3).requires_grad_()
        (x @ whole(4, 3).T).sin().sum().backward()
        for grad_placements in (None, [Replicate()], [Partial()]):
            local = whole(2, 3).requires_grad_()
            y = ShardTensor.from_local(local, mesh, [Replicate()], grad_placements=grad_placements)
            (y @ weight.T).sin().sum().backward()
            grad = ShardTensor.from_local(local.grad, mesh, grad_placements or [Replicate()]).full_tensor()
            assert_close(grad, x.grad, f"gradient of {grad_placements}")

    on_ranks(2, run)


def test_local_map_redistributes():
    def run(mesh):
        x = distribute_tensor(whole(4, 4), mesh, [Shard(0)])
        y = local_map(torch.sin, [Shard(-1)], ([Shard(-1)],), redistribute_inputs=True)(x)
        assert y.placements == (Shard(1),)
        assert_close(y.full_tensor(), whole(4, 4).sin(), "sine")

    on_ranks(2, run)


def test_plain_tensors_are_replicated_implicitly():
    def run(mesh):
        x = distribute_tensor(whole(4), mesh, [Shard(0)])
        with promotion_mode("disabled"):
            with pytest.raises(ValueError, match="mixed with a ShardTensor"):
                x + whole(4)
            with implicit_replication():
                assert_close((x + whole(4)).full_tensor(), whole(4) * 2, "sum")

    on_ranks(2, run)


def test_part_and_offset_of_a_layout():
    def run(mesh):
        shape, offset = compute_local_shape_and_global_offset((7, 3), mesh, [Shard(0)])
        assert (shape, offset) == [((4, 3), (0, 0)), ((3, 3), (4, 0))][mesh.get_rank()]

    on_ranks(2, run)


def test_the_report_counts_as_comm_debug_mode():
    def run(mesh):
        x = distribute_tensor(whole(4, 4), mesh, [Shard(0)])
        with report() as r:
            x.sum()
            x.redistribute(placements=[Shard(1)])
        assert r.get_comm_counts() == {"all_reduce": 1, "all_to_all": 1} and r.get_total_counts() == 2

    on_ranks(2, run)


# --- torch's meshes and DTensors


def torchs_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh as init_torchs_mesh

    theirs = init_torchs_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ours = DeviceMesh.from_torch(theirs)
    x = distribute_tensor(whole(4, 5), theirs, [Shard(0), Shard(1)])
    assert x.device_mesh is ours
    local = x.to_local()
    tp = theirs["tp"]
    y = ShardTensor.from_local(local, tp, [Shard(1)])
    assert y.device_mesh is ours["tp"] and y.shape == (2, 5)
    assert_close(
        y.redistribute(tp, [Replicate()]).to_local(), whole(4, 5).chunk(2)[theirs.get_local_rank("dp")], "rows"
    )


@pytest.mark.process
def test_torchs_mesh_in():
    processes(4).run(torchs_mesh, mesh={})


def without_a_copy() -> None:
    from torch.distributed.tensor import DTensor as TorchDTensor
    from torch.distributed.tensor import distribute_tensor as distribute_dtensor

    mesh = init_device_mesh("cpu", (2,))
    for placement in (Shard(0), Shard(1), Replicate()):
        theirs = distribute_dtensor(whole(7, 3), mesh.to_torch(), [placement])
        ours = ShardTensor.from_dtensor(theirs)
        assert ours.to_local().data_ptr() == theirs.to_local().data_ptr()
        back = ours.to_dtensor()
        assert type(back) is TorchDTensor and back.placements == theirs.placements and back.stride() == theirs.stride()
        assert back.to_local().data_ptr() == theirs.to_local().data_ptr()
    partial = TorchDTensor.from_local(whole(3), mesh.to_torch(), [Partial()])
    assert_close(ShardTensor.from_dtensor(partial).to_dtensor().full_tensor(), whole(3) * 2, "a sum")


@pytest.mark.process
def test_dtensors_in_and_out_without_a_copy():
    processes(2).run(without_a_copy, mesh={})

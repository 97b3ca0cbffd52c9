"""`report()`: collectives and bytes by function, forward and backward, and what records do not say."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    fallback,
    init_device_mesh,
    report,
)
from neuronx_dist.shard_tensor.attention_method import attention_method
from neuronx_dist.shard_tensor.report import note, predict, watched
from tests.shard_tensor.support.cases import on_ranks

HALO = 1 * 2 * 8 * 4  # bytes of a row of (1, 2, 16, 8) in fp32


def image(mesh):
    return distribute_tensor(torch.ones(1, 2, 16, 8, requires_grad=True), mesh, [Shard(2)], src=None)


def test_collectives_and_bytes_by_function():
    def run(mesh):
        x, weight = image(mesh), torch.ones(2, 2, 3, 3, requires_grad=True)
        with report() as r, comm.record() as calls:
            F.conv2d(x, weight, padding=1).square().mean().backward()
        assert [each.call for each in r.calls] == calls
        assert r.collectives == 4 and r.bytes == sum(call.bytes for call in calls)
        return {op: (total.collectives, total.bytes, total.predicted) for op, total in r.by_op().items()}, str(r)

    for rank, (totals, text) in enumerate(on_ranks(3, run)):
        halo = HALO * (2 if rank == 1 else 1)
        assert totals == {
            "conv2d": ({"exchange": 1}, halo, halo),
            "mean": ({"all_reduce": 1}, 4, 0),
            "conv2d, backward": ({"exchange": 1}, halo, halo),
            "convert(I, R), backward": ({"all_reduce": 1}, 2 * 2 * 3 * 3 * 4, 0),
        }
        assert text.startswith(f"4 collectives, {2 * halo + 4 + 144} bytes\n")
        assert f"predicted {halo} of {halo}" in text


def test_a_handler_of_a_user_is_the_function_that_communicates():
    def doubled(x):
        return torch.overrides.handle_torch_function(doubled, (x,), x)

    def handler(func, types, args, kwargs):
        return ShardTensor.from_local(args[0].full_tensor() * 2, args[0].device_mesh)

    def run(mesh):
        ShardTensor.register_function_handler(doubled, handler)
        with report() as r:
            doubled(image(mesh))
        with report() as methods:
            image(mesh).full_tensor()
        return list(r.by_op()), list(methods.by_op())

    assert on_ranks(2, run) == [(["doubled"], ["full_tensor"])] * 2


def test_gathers_are_listed_with_their_lines_also_silent_ones():
    def run(mesh):
        x = image(mesh)
        with report() as r, fallback("gather"):
            line = inspect.currentframe().f_lineno + 1
            torch.histc(x.detach(), 4)
        return r, line

    for r, line in on_ranks(2, run):
        (gather,) = r.gathers
        assert (gather.op, gather.bytes) == ("histc", 2 * 16 * 8 * 4)
        assert gather.site == f"{__file__}:{line}"
        assert f"histc has no handler: gathers {gather.bytes:,} bytes, at {__file__}" in str(r)


def test_backward_of_a_split_is_named_and_equal_lines_are_counted():
    def run(mesh):
        x = distribute_tensor(torch.ones(5, 4, requires_grad=True), mesh, [Replicate()], src=None)
        y = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)], src=None)
        with report() as r:
            for _ in range(2):
                (x * y).sum().backward()
                y.flatten(0).view(2, 10)
        return r

    for r in on_ranks(2, run):
        assert r.by_op()["mul, backward"].collectives == {"exchange": 2}
        assert len(r.notes) == 2 and str(r).count("view: shards of dim 0") == 1
        assert str(r).endswith(" (2 times)")


def test_what_handlers_tell():
    def run(mesh):
        assert not watched()
        note("attention", "nobody listens")
        with report() as outer, report() as inner:
            assert watched()
            note("attention", "ring: 96 bytes, a gather 192")
            predict(96, "attention")
        assert inner.notes == outer.notes == [("attention", "ring: 96 bytes, a gather 192")]
        assert inner.by_op()["attention"].predicted == 96
        return str(inner)

    for text in on_ranks(2, run):
        assert text.startswith("0 collectives, 0 bytes: nothing travels")
        assert text.endswith("attention: ring: 96 bytes, a gather 192")


def test_the_choice_of_attention():
    def run(mesh):
        q, k, v = (image(mesh) for _ in range(3))
        with report() as r, attention_method("ring"):
            F.scaled_dot_product_attention(q, k, v)
        return r.notes

    for ((op, text),) in on_ranks(2, run):
        assert op == "scaled_dot_product_attention"
        assert text.startswith("ring, forced: ring ") and "gather " in text and " bytes, holds " in text


def test_all_ranks_of_this_process():
    def run(mesh):
        if mesh.get_rank():
            comm.barrier("world")
            image(mesh).full_tensor()
            comm.barrier("world")
            return None
        with report(all_ranks=True) as r:
            comm.barrier("world")
            image(mesh).full_tensor()
            comm.barrier("world")
        return r

    first, _ = on_ranks(2, run)
    assert first.by_op()["full_tensor"].collectives == {"all_gather": 2}


@pytest.mark.parametrize("ranks", [1, 4, 5])
def test_a_rank_that_is_played_communicates_as_in_the_job(ranks):
    """Halos, a transpose, padding to a field of other shards, reductions, and their backward; uneven for five."""

    def step(mesh):
        x = ShardTensor.from_local(torch.ones(1, 2, 2, 6, requires_grad=True), mesh, [Shard(2)])
        weight = torch.ones(2, 2, 3, 3, requires_grad=True)
        y = F.conv2d(x, weight, padding=1)
        modes = torch.fft.rfft2(y)[:, :, :, :2]
        y = torch.fft.irfft2(F.pad(modes, (0, 2)), s=y.shape[2:]) + y
        F.pad(y[:, :, :2], (0, 0, 0, 40)).square().mean().backward()

    def run(mesh):
        with report() as r:
            step(mesh)
        return r.calls, str(r)

    for rank, (calls, text) in enumerate(on_ranks(ranks, run)):
        with report(mesh=ranks, rank=rank) as played:
            step(DeviceMesh("cpu", range(ranks)))
        assert [entry.call for entry in played.calls] == [entry.call for entry in calls]
        assert str(played) == text
    assert sum(entry.call.messages for entry in calls) > (4 if ranks > 1 else -1)


def test_the_rank_that_is_played():
    with report(mesh=Mesh(8, tp=2)) as r:
        assert comm.rank("world") == 4 and comm.size("tp") == 2 and r.rank == 4
    with pytest.raises(ValueError, match="rank 8 is not one of the 8 ranks of the mesh"), report(mesh=8, rank=8):
        pass
    with pytest.raises(ValueError, match="rank=1 is played on a mesh: pass mesh="), report(rank=1):
        pass
    assert not comm.is_initialized()


def test_operands_that_a_handler_needs_whole_are_told():
    def run(mesh):
        x = distribute_tensor(torch.ones(5, 4), mesh, [Shard(0)], sizes=[(4, 1)], src=None)
        w = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)], src=None)
        with report() as r:
            line = inspect.currentframe().f_lineno + 1
            torch.nn.functional.linear(x, w)
        with report() as nothing:
            x * 2
        return r.notes, line, nothing.notes

    for notes, line, nothing in on_ranks(2, run):
        assert notes == [("linear", f"gathers {2 * 4 * 4} bytes, of (2, 4), at {__file__}:{line}")]
        assert nothing == []


def test_meshes_are_made_and_divided_inside_of_a_report():
    with report(mesh=8) as r:
        grid = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "domain"))
        x = ShardTensor.from_local(torch.empty(1, 2, 4, 6), grid["domain"], [Shard(2)])
        F.conv2d(x, torch.empty(2, 2, 3, 3), padding=1)
        assert grid["dp", "domain"]._flatten("world").size() == 8
    assert [entry.call.verb for entry in r.calls] == ["exchange"]


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_interpolation_is_played_and_then_computed(mode):
    """Windows of an interpolation are numbers, which have values where a job is played on shapes."""

    def interpolated(mesh):
        x = ShardTensor.from_local(torch.ones(1, 1, 7, 6), mesh, [Shard(2)])
        return F.interpolate(x, size=(31, 11), mode=mode)

    with report(mesh=3) as played:
        interpolated(DeviceMesh("cpu", range(3)))

    def rank():
        with report() as communicated:
            y = interpolated(DeviceMesh("cpu", range(3))).full_tensor()
        return len([entry for entry in communicated.calls if entry.op == "interpolate"]), y

    for count, y in comm.threads.run(Mesh(3), rank):
        assert count == len(played.calls)
        torch.testing.assert_close(y, F.interpolate(torch.ones(1, 1, 21, 6), size=(31, 11), mode=mode))

"""One tensor dim on several mesh dims: layouts, where operands move, writes, modules, checkpoints, and the checker."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    distribute_module,
    distribute_tensor,
    fallback,
    one_exchange,
    report,
    scatter_tensor,
)
from neuronx_dist.shard_tensor.spec import make_spec
from tests.shard_tensor.sharding import Foreign
from tests.shard_tensor.support.cases import assert_close, on_ranks, sizes, verbs

TWICE = [Shard(0), Shard(0)]
GRIDS = [(2, 2), (2, 3), (2, 2, 2)]


def whole(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).sin()


def on_grid(function, shape):
    return on_ranks(torch.Size(shape).numel(), function, shape)


def layouts_are_torchs(mesh):
    """Mesh dim 0 splits first, mesh dim 1 each of its parts, and so on."""
    for size in (16, 7, 3):
        x, coordinate = whole(size, 2), mesh.get_coordinate()
        part = x
        for m, index in enumerate(coordinate):
            chunks = part.chunk(mesh.shape[m])
            part = chunks[index] if index < len(chunks) else part[:0]
        for src in (0, None, mesh.size() - 1):
            y = distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim, src=src)
            assert torch.equal(y.to_local(), part)
            assert y.offsets == (sum(y._spec.sizes[0][: mesh.get_rank()]), 0)
        z = ShardTensor.from_local(part, mesh, [Shard(0)] * mesh.ndim)
        assert z._spec is y._spec and torch.equal(z.full_tensor(), x)
        again = ShardTensor.from_local(part, mesh, y.placements, sharding_shapes=y._spec.sharding_shapes())
        assert again._spec is y._spec
        scattered = scatter_tensor(x if mesh.get_rank() == 1 else None, 1, mesh, y.placements)
        assert torch.equal(scattered.to_local(), part)


@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_layouts_are_torchs(shape):
    on_grid(layouts_are_torchs, shape)


def loss_on_a_part(mesh):
    """Each half of the ranks holds the same tensor on its part of the mesh."""
    grid = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("dp", "cp", "tp"))
    for part in (grid["cp", "tp"], grid["tp", "cp"], grid["cp", "tp"]["tp", "cp"]):
        x = distribute_tensor(whole(7, 3), part, TWICE, src=None).requires_grad_()
        y = x.softmax(0)
        assert y.placements == x.placements and y._spec.sizes[0] == (2, 2, 2, 1)
        y.square().sum().backward()
        twin = whole(7, 3).requires_grad_()
        twin.softmax(0).square().sum().backward()
        assert_close(x.grad.full_tensor(), twin.grad, "gradient")
        picture = distribute_tensor(whole(1, 4, 6), part, [Shard(1), Shard(2)], src=None)
        with fallback("error"):
            merged = picture.flatten(1)
        assert merged.placements == (Shard(1), Shard(1))
        assert_close(merged.full_tensor(), whole(1, 4, 6).flatten(1), "a view that merges two sharded dims")


def test_on_a_part_of_a_mesh():
    on_grid(loss_on_a_part, (2, 2, 2))


def test_mesh_dims_that_are_no_neighbours():
    """Dims 0 and 2 of a mesh shard rows, dim 1 columns; src is counted in the mesh's order."""

    def rank(mesh):
        x = whole(9, 4)
        placements = [Shard(0), Shard(1), Shard(0)]
        along = sizes(9, 4, "uneven")
        for src in (0, 3, 6, None):
            sent = x if src in (None, mesh.get_rank()) else torch.zeros_like(x)
            y = distribute_tensor(sent.clone().requires_grad_(), mesh, placements, sizes=[along, (1, 3), None], src=src)
            (a, b, c), column = mesh.get_coordinate(), 0
            start = sum(along[: 2 * a + c])
            expected = x[start : start + along[2 * a + c], b and 1 : 4 if b else 1]
            assert torch.equal(y.to_local(), expected), column
        (F.softmax(y, 0) * y).sum().backward()
        z = x.clone().requires_grad_()
        (F.softmax(z, 0) * z).sum().backward()
        assert_close(y.grad.full_tensor(), z.grad, "gradient")

    on_grid(rank, (2, 2, 2))


@pytest.mark.parametrize("split", ["chunk", "uneven", "one"])
@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_a_layer_and_a_loss(shape, split):
    """Pointwise functions, a linear, a normalisation and reductions over the dim: values, and every gradient."""

    def model(x, w, b):
        y = F.layer_norm(F.linear(x, w, b).sin() * 2, (3,))
        return y.sum(0), y.mean(0), y.var(0), (y * y).mean(), y.softmax(0), y.cumsum(0), y.flip(0), y[3:11], x @ w.t()

    plain = [whole(16, 5).requires_grad_(), whole(3, 5).cos().requires_grad_(), whole(3).requires_grad_()]
    plain = [x.detach().requires_grad_() for x in plain]
    expected = model(*plain)
    sum((y * y.detach().cos()).sum() for y in expected).backward()

    def rank(mesh):
        along = sizes(16, mesh.size(), split)
        x = distribute_tensor(
            plain[0].detach().requires_grad_(), mesh, [Shard(0)] * mesh.ndim, sizes=[along] * mesh.ndim, src=None
        )
        w, b = (y.detach().clone().requires_grad_() for y in plain[1:])
        with fallback("error"):
            results = model(x, w, b)
        for actual, y in zip(results, expected):
            assert_close(actual.full_tensor().detach(), y.detach(), "value")
        sum((y * y.detach().cos()).sum() for y in results).backward()
        for operand, y in zip((x.grad.full_tensor(), w.grad, b.grad), plain):
            assert_close(operand, y.grad, "gradient")

    on_grid(rank, shape)


# --- operands that have no layout on the merged mesh


def test_the_smaller_side_moves_and_the_report_says_so():
    def rank(mesh):
        x = distribute_tensor(whole(8, 6).requires_grad_(), mesh, [Shard(0), Replicate()], src=None)
        w = distribute_tensor(whole(5, 6).requires_grad_(), mesh, TWICE, src=None)
        with report() as r:
            y = F.linear(x, w)
        assert r.notes[0] == (
            "linear",
            "[Shard(dim=0), Shard(dim=0)] of (5, 6) moves to [Replicate(), Shard(dim=0)]",
        )
        assert y.placements == (Shard(0), Shard(1))
        y.sin().sum().backward()
        a, b = whole(8, 6).requires_grad_(), whole(5, 6).requires_grad_()
        F.linear(a, b).sin().sum().backward()
        assert_close(x.grad.full_tensor(), a.grad, "input")
        assert_close(w.grad.full_tensor(), b.grad, "weight")
        assert w.grad.placements == tuple(TWICE) and x.grad.placements == (Shard(0), Replicate())
        z = distribute_tensor(whole(5, 6), mesh, [Shard(0), Replicate()], src=None)
        with comm.record() as calls:
            assert (z + w).placements == tuple(TWICE)  # of one shape: a slice
        assert_close((z + w).full_tensor().detach(), whole(5, 6) * 2, "sum")
        return sum(call.bytes for call in calls)

    assert set(on_grid(rank, (2, 2))) <= {0, *range(200)}


# --- writes, views, graphs


def test_writes_views_and_hooks():
    def rank(mesh):
        x = distribute_tensor(whole(9, 4).requires_grad_(), mesh, TWICE, sizes=[sizes(9, 4, "uneven"), None], src=None)
        y = x * 2
        view = y.t()
        y.add_(1).mul_(x)
        assert y.placements == tuple(TWICE)
        y[2:5] = 0.0
        seen = []
        y.register_hook(lambda grad: seen.append(grad.placements))
        view.sin().sum().backward()
        a = whole(9, 4).requires_grad_()
        b = a * 2
        transposed = b.t()
        b.add_(1).mul_(a)
        b[2:5] = 0.0
        transposed.sin().sum().backward()
        assert seen == [tuple(TWICE)]
        assert_close(view.full_tensor().detach(), transposed.detach(), "view")
        assert_close(x.grad.full_tensor(), a.grad, "gradient")
        plain = distribute_tensor(whole(9, 4), mesh, [Shard(0), Replicate()], src=None)
        plain.add_(x.detach())
        assert plain.placements == (Shard(0), Replicate())
        assert_close(plain.full_tensor(), whole(9, 4) * 2, "written in its layout")
        z = x * 1
        z.mul_(x)
        (seen_by_foreign,) = torch.autograd.grad(Foreign.apply(z).sum(), x)  # by the wrapper's graph
        assert_close(seen_by_foreign.full_tensor(), 2 * whole(9, 4), "gradient of a foreign function")
        (grad,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        (double,) = torch.autograd.grad(grad.sum(), x)
        assert_close(double.full_tensor(), 6 * whole(9, 4), "gradient of a gradient")

    on_grid(rank, (2, 2))


@pytest.mark.slow
def test_parameters_optimizers_and_copies():
    """Parameters of several layouts in one optimizer, foreach and fused: the steps of one process."""
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5)).double()
        model_state = copy.deepcopy(plain)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1, **options)
        for step in range(3):
            optimizer.zero_grad()
            plain(whole(8, 6) + step).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()

        def rank(mesh):
            model = copy.deepcopy(model_state)  # noqa: B023

            def partition(name, module, mesh):
                for key, param in list(module.named_parameters(recurse=False)):
                    placements = TWICE if key == "weight" and name == "0" else [Replicate(), Shard(0)]
                    module.register_parameter(key, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))

            distribute_module(model, mesh, partition)
            model = copy.deepcopy(model)
            assert model[0].weight.placements == tuple(TWICE)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)  # noqa: B023
            x = distribute_tensor(whole(8, 6), mesh, [Shard(0), Replicate()], src=None)
            for step in range(3):
                optimizer.zero_grad()
                model(x + step).square().sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            for a, b in zip(model.parameters(), plain.parameters()):  # noqa: B023
                assert_close(a.full_tensor().detach(), b.detach(), "parameter")
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            loaded = torch.load(file, weights_only=True)
            assert loaded["0.weight"]._spec is model[0].weight._spec

        on_grid(rank, (2, 2))


def test_awaited_and_one_exchange():
    def rank(mesh):
        x = distribute_tensor(whole(2, 3, 16).requires_grad_(), mesh, [Shard(2), Shard(2)], src=None)
        for placements in ([Shard(2), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(0)]):
            y = x.redistribute(placements=placements, async_op=True)
            assert_close((y * 1).full_tensor().detach(), whole(2, 3, 16), "awaited")
        weight = whole(3, 3, 3)
        layers = [lambda x: F.conv1d(x, weight, padding=1), F.relu]
        assert_close(
            one_exchange(x, layers).full_tensor().detach(), F.conv1d(whole(2, 3, 16), weight, padding=1).relu(), "conv"
        )

    on_grid(rank, (2, 2))


# --- exchanges that lead to such layouts


def views(mesh):
    for shape, target in (((4, 6), (24,)), ((2, 3, 5), (30,)), ((4, 6), (8, 3)), ((2, 2, 2), (8,))):
        for placements in ([Shard(0), Shard(1)], [Shard(1), Shard(0)]):
            x = distribute_tensor(whole(*shape).requires_grad_(), mesh, placements, src=None)
            with fallback("error"), report() as r:
                y = x.reshape(target)
            if len(shape) == 2:
                assert y.placements == tuple(TWICE), (shape, placements)
                assert len(r.calls) == 1 and r.notes, r
            assert_close(y.full_tensor().detach(), whole(*shape).view(target), f"{shape} {placements}")
            with fallback("error"):
                z = y.view(shape)
            assert_close(z.full_tensor().detach(), whole(*shape), "back")
            (z * whole(*shape).cos()).sum().backward()
            assert_close(x.grad.full_tensor(), whole(*shape).cos(), "gradient")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)], ids=str)
def test_a_view_that_merges_two_sharded_dims(shape):
    on_grid(views, shape)


def fourier(mesh):
    """A field whose two dims lie on two mesh dims, whole in neither: pencils, and no gather."""
    for function in (torch.fft.fft2, torch.fft.rfft2, lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(7, 10))):
        x = distribute_tensor(whole(7, 10).requires_grad_(), mesh, [Shard(0), Shard(1)], src=None)
        a = whole(7, 10).requires_grad_()
        with fallback("error"):
            y = function(x)
        expected = function(a)
        actual = y.full_tensor().detach()
        parts = [torch.view_as_real(z) if z.is_complex() else z for z in (actual, expected.detach())]
        assert_close(*parts, "transform")
        y.abs().square().sum().backward()
        expected.abs().square().sum().backward()
        assert_close(x.grad.full_tensor(), a.grad, "gradient")


@pytest.mark.parametrize("shape", [(2, 2), (2, 3)], ids=str)
def test_fourier_pencils_of_two_dims(shape):
    on_grid(fourier, shape)


# --- the checker


def test_the_checker_follows_axes_of_the_job():
    def rank():
        mesh = DeviceMesh.from_axes(("dp", "tp"))
        with spmd.SpmdTypeMode():
            x = distribute_tensor(whole(9, 4).requires_grad_(), mesh, TWICE, src=None)
            w = distribute_tensor(whole(3, 4).requires_grad_(), mesh, [Replicate(), Replicate()], src=None)
            y = F.linear(x, w).softmax(0)
            y.sum().backward()
            z = x.redistribute(placements=[Shard(0), Replicate()])
            z.square().sum().backward()
            assert x.grad.placements == tuple(TWICE) and w.grad.is_leaf

    threads.run(Mesh(4, tp=2), rank)


def test_a_partial_maximum_is_reduced_before_it_moves():
    def rank(mesh):
        local = whole(6, 2) * (mesh.get_rank() + 1)
        x = ShardTensor.from_local(local, mesh, [Partial("max"), Partial("max")])
        y = x.redistribute(placements=TWICE)
        assert_close(y.full_tensor(), torch.maximum(whole(6, 2), whole(6, 2) * 4), "maximum")

    on_grid(rank, (2, 2))


def test_names_of_the_layout():
    def rank(mesh):
        spec = make_spec(mesh, TWICE, (7, 2), [(3, 1, 0, 3), None])
        assert spec.sizes == ((3, 1, 0, 3), (3, 1, 0, 3)) and spec.merged.placements == (Shard(0),)
        assert spec.num_shards == 4 and spec.num_shards_map == [4, 1] and spec.groups == ((0, 1),)
        assert [shape[0] for shape in spec.sharding_shapes(1)] == [3, 1, 0, 3]
        assert spec.local_shape == ((3, 1, 0, 3)[mesh.get_rank()], 2)
        assert make_spec(mesh, TWICE, (7, 2), [None, [3, 1, 0, 3]]) is spec

    on_grid(rank, (2, 2))


def test_equal_layouts_cost_nothing():
    def rank(mesh):
        x = distribute_tensor(whole(8, 2), mesh, TWICE, src=None)
        with comm.record() as calls:
            assert x.redistribute(mesh, TWICE) is x
            (x * 2 + x).sin()
        assert verbs(calls) == []

    on_grid(rank, (2, 2))

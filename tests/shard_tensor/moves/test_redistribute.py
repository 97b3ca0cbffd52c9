"""From every layout to every other one: values, gradients, and what is communicated."""

from __future__ import annotations

import itertools

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor, distribute_tensor
from tests.shard_tensor.support.cases import FULL, SPLITS, assert_close, on_ranks, sizes, verbs

SHAPE = (16, 6)


def whole() -> torch.Tensor:
    return torch.arange(96, dtype=torch.float64).view(SHAPE).sin()


def layouts(mesh):
    """Placements and sizes on a mesh, Partial left out; a dim may be sharded on several mesh dims."""
    for dims in itertools.product((None, 0, 1), repeat=mesh.ndim):
        sharded = sorted({*dims} - {None})
        for splits in itertools.product(SPLITS, repeat=len(sharded)):
            along = {}
            for d, split in zip(sharded, splits):
                count = torch.Size(size for size, other in zip(mesh.shape, dims) if other == d).numel()
                along[d] = sizes(SHAPE[d], count, split)
            yield [Replicate() if d is None else Shard(d) for d in dims], [along.get(d) for d in dims]


def all_pairs(mesh, most=400 if FULL else 120):
    x = whole()
    weight = torch.linspace(-1, 1, 96, dtype=torch.float64).view(SHAPE)
    pairs = list(itertools.product(layouts(mesh), repeat=2))
    for (src, src_sizes), (dst, dst_sizes) in pairs[:: max(1, len(pairs) // most)]:
        a = distribute_tensor(x.clone().requires_grad_(), mesh, src, sizes=src_sizes, src=None)
        b = a.redistribute(mesh, dst, sizes=dst_sizes)
        assert list(b.placements) == list(dst)
        assert b.to_local().shape == b._spec.local_shape
        assert_close(b.full_tensor().detach(), x, f"{src} {src_sizes} -> {dst} {dst_sizes}")
        b.backward(weight)
        assert_close(a.grad.full_tensor(), weight, f"gradient of {src} {src_sizes} -> {dst} {dst_sizes}")
        assert (b is a) == (a._spec is b._spec)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_all_pairs(shape):
    on_ranks(torch.Size(shape).numel(), all_pairs, shape)


def on_two_mesh_dims(mesh):
    """From sums and maxima to a dim on two mesh dims, and back: the same values and gradients."""
    twice = [Shard(0), Shard(0)]
    for op, src, split in itertools.product(
        ("sum", "avg", "max", "min", "product"), ("PP", "PR", "RP", "SP", "PS"), SPLITS
    ):
        layout = [{"P": Partial(op), "R": Replicate(), "S": Shard(1)}[letter] for letter in src]
        a = distribute_tensor(whole().requires_grad_(), mesh, src=None)
        b = a.redistribute(placements=layout)
        along = sizes(16, mesh.size(), split)
        c = b.redistribute(placements=twice, sizes=[along, along])
        what = f"{layout} -> {twice} {along}"
        assert c.placements == tuple(twice) and c._spec.sizes[0] == c._spec.sizes[1] == c._spec.merged.sizes[0]
        assert_close(c.full_tensor().detach(), whole(), what)
        d = c.redistribute(placements=layout)
        assert_close(d.full_tensor().detach(), whole(), f"{what} and back")
        d.backward(whole().cos())
        assert_close(a.grad.full_tensor(), whole().cos(), f"gradient of {what} and back")


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)], ids=str)
def test_sums_and_maxima_to_a_dim_on_two_mesh_dims(shape):
    on_ranks(torch.Size(shape).numel(), on_two_mesh_dims, shape)


def sums(mesh):
    """Partial from local tensors: their sum, in each layout; the gradient of each summand is that of the sum."""
    group = mesh.communicator()
    for dst, split in [(Replicate(), None), *((Shard(d), s) for d in (0, 1) for s in SPLITS)]:
        local = (whole() * (group.rank + 1)).requires_grad_()
        a = ShardTensor.from_local(local, mesh, [Partial()])
        along = None if split is None else [sizes(SHAPE[dst.dim], group.size, split)]
        b = a.redistribute(placements=[dst], sizes=along)
        total = whole() * sum(range(1, group.size + 1))
        assert_close(b.full_tensor().detach(), total, f"a sum as {dst} {split}")
        b.backward(whole().cos())
        assert_close(local.grad, whole().cos(), f"the gradient of a summand, by {dst} {split}")


@pytest.mark.parametrize("count", [2, 3])
def test_sums(count):
    on_ranks(count, sums)


def replicate_to_partial(mesh):
    for op in ("sum", "avg", "max", "min", "product"):
        a = distribute_tensor(whole().requires_grad_(), mesh, src=None)
        b = a.redistribute(placements=[Partial(op)])
        assert b.placements == (Partial(op),)
        assert_close(b.full_tensor().detach(), whole(), f"a whole tensor as {op}")
        b.backward(whole().cos())
        assert_close(a.grad.full_tensor(), whole().cos(), f"its gradient as {op}")


def test_replicate_to_partial():
    on_ranks(3, replicate_to_partial)


def maxima(mesh):
    group = mesh.communicator()
    local = (whole() * (-1) ** group.rank).requires_grad_()
    b = ShardTensor.from_local(local, mesh, [Partial("max")]).redistribute(placements=[Replicate()])
    assert_close(b.full_tensor().detach(), whole().abs() if group.size > 1 else whole(), "a maximum, not a sum")
    b.sum().backward()
    count = comm.all_reduce(local.grad, group)
    assert_close(count, torch.ones(SHAPE, dtype=torch.float64), "one gradient for each maximum")


def test_a_partial_maximum_is_never_added():
    on_ranks(2, maxima)


def other_partials(mesh):
    number = mesh.get_rank() + 1.0
    values = {"sum": 6.0, "avg": 2.0, "max": 3.0, "min": 1.0, "product": 6.0}
    for src, dst in itertools.permutations(values, 2):
        x = ShardTensor.from_local(torch.full((2,), number, requires_grad=True), mesh, [Partial(src)])
        y = x.redistribute(placements=[Partial(dst)])
        assert y.placements == (Partial(dst),)
        assert y.full_tensor().tolist() == [values[src]] * 2, (src, dst)


def test_each_partial_as_each_other():
    on_ranks(3, other_partials)


def means(mesh):
    group = mesh.communicator()
    for dst, split in [(Replicate(), None), (Shard(0), (11, 5)), (Partial(), None), (Partial("avg"), None)]:
        local = (whole() * (group.rank + 1)).requires_grad_()
        a = ShardTensor.from_local(local, mesh, [Partial("avg")])
        b = a.redistribute(placements=[dst], sizes=[split])
        assert b.placements == (dst,)
        assert_close(b.full_tensor().detach(), whole() * 1.5, f"a mean as {dst}")
        b.backward(whole().cos())
        assert_close(local.grad, whole().cos() / 2, f"the gradient of a rank's part of a mean, by {dst}")
        assert_close((a * 2).sum().full_tensor().detach(), whole().sum() * 3, "a mean in use")
    same = distribute_tensor(whole(), mesh, src=None).redistribute(placements=[Partial("avg")])
    assert_close(same.redistribute(placements=[Partial()]).full_tensor(), whole(), "a mean of equals")


def test_a_partial_mean_is_divided_by_the_number_of_ranks():
    on_ranks(2, means)


@pytest.mark.parametrize("sizes", [(1, 12, 0, 3), (4, 4, 4, 4)])
@pytest.mark.parametrize("dst", [Replicate(), Shard(0), Partial()])
def test_means_of_shards_are_weighed_by_the_global_count(sizes, dst):
    """The mean of each rank's rows, told how many rows each has: the mean of all rows, and its gradient."""

    def run(mesh):
        x = distribute_tensor(whole().requires_grad_(), mesh, [Shard(0)], sizes=[sizes], src=None)
        with comm.record() as calls:
            y = ShardTensor.from_local(
                x.to_local().mean(0), mesh, [Partial("avg")], sharding_shapes=x._spec.sharding_shapes()
            )
        assert list(calls) == []
        assert y.placements == (Partial("avg") if len(set(sizes)) == 1 else Partial(),)
        y = y.redistribute(placements=[dst])
        assert_close(y.full_tensor().detach(), whole().mean(0), "mean")
        y.backward(whole()[0])
        assert_close(x.grad.full_tensor(), whole()[0].expand(16, -1) / 16, "gradient")

    on_ranks(4, run)


def another_mesh(mesh):
    x = distribute_tensor(whole().requires_grad_(), mesh, [Shard(0)], sizes=[(1, 12, 0, 3)], src=None)
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    y = x.redistribute(grid, [Shard(1), Shard(0)])
    assert y.device_mesh is grid
    assert y.to_local().shape == (8, 3)
    assert_close(y.full_tensor().detach(), whole(), "another mesh")
    y.backward(whole().cos())
    assert_close(x.grad.full_tensor(), whole().cos(), "its gradient")
    assert x.redistribute(grid, [Replicate(), Replicate()]).device_mesh is grid


def test_another_mesh_is_never_ignored():
    on_ranks(4, another_mesh)


def nothing(mesh):
    x = distribute_tensor(whole(), mesh, [Shard(0)], src=None)
    with comm.record() as calls:
        assert x.redistribute() is not x
        assert x.redistribute(placements=[Shard(-2)]) is x
        assert x.redistribute(mesh, x.placements, sizes=[(8, 8)]) is x
    return verbs(calls)


def test_an_equal_layout_costs_nothing():
    assert on_ranks(2, nothing) == [["all_gather"]] * 2


def test_refusals_are_alike():
    def refuse(mesh):
        x = distribute_tensor(whole(), mesh, [Shard(0)], src=None)
        for placements, along, words in [
            ([Shard(0)], [(3, 5)], "with sum 16"),
            ([Shard(0)], [(20, -4)], "2 numbers of at least 0"),
            ([Shard(0), Shard(1)], None, "has 2 entries for a mesh of 1 dims"),
            ([Shard(2)], None, "the tensor has 2 dims"),
        ]:
            with pytest.raises(ValueError, match=words):
                x.redistribute(placements=placements, sizes=along)

    on_ranks(2, refuse)

"""From a mesh to another one, of other ranks or of another number of them: values, gradients, and what travels."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor, distribute_tensor
from neuronx_dist.shard_tensor.moves.other_mesh import planned_bytes
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs

# ranks, placements, sizes
LAYOUTS = [
    ([0, 1, 2, 3], [Shard(0)], [(1, 12, 0, 3)]),
    ([3, 1, 0, 2], [Shard(0)], [(1, 12, 0, 3)]),
    ([0, 1], [Shard(0)], [(11, 5)]),
    ([1, 3], [Shard(1)], [(0, 6)]),
    ([2], [Replicate()], None),
    ([1, 2, 3], [Replicate()], None),
    ([3, 0, 1], [Shard(0)], [(2, 9, 5)]),
    ([[0, 1], [2, 3]], [Shard(1), Shard(0)], [(2, 4), (5, 11)]),
    ([[3, 1], [0, 2]], [Replicate(), Shard(1)], None),
    ([0, 2], [Partial()], None),
    ([[1, 0], [3, 2]], [Shard(0), Partial()], None),
]


def whole() -> torch.Tensor:
    return torch.arange(96, dtype=torch.float64).view(16, 6).sin()


def made(mesh, placements, sizes):
    """A leaf, or a Partial made from one; its values are `whole()`."""
    kept = [Replicate() if isinstance(p, Partial) else p for p in placements]
    leaf = distribute_tensor(whole().requires_grad_(), mesh, kept, sizes=sizes, src=None)
    return leaf, leaf.redistribute(placements=placements, sizes=sizes)


def own_of(x: ShardTensor, values: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor, by the layout of `x`."""
    if x.device_mesh.get_coordinate() is None:
        return values[:0]
    for dim, offset in enumerate(x.offsets):
        values = values.narrow(dim, offset, x.to_local().shape[dim])
    return values


def pairs(_):
    rank, weight = comm.rank("world"), whole().cos()
    for src, dst in itertools.product(LAYOUTS, repeat=2):
        what = f"{src} -> {dst}"
        leaf, x = made(DeviceMesh("cpu", src[0]), *src[1:])
        y = x.redistribute(DeviceMesh("cpu", dst[0]), dst[1], sizes=dst[2])
        assert y.device_mesh.mesh.tolist() == dst[0], what
        assert y.shape == whole().shape
        if any(isinstance(p, Partial) for p in dst[1]):
            value = y if y.device_mesh is x.device_mesh else y.redistribute(placements=[Replicate()] * len(dst[1]))
            if value is not y:
                assert_close(value.to_local().detach(), own_of(value, whole()), what)
        else:
            assert_close(y.to_local().detach(), own_of(y, whole()), what)
        y.backward(weight)
        assert leaf.grad.device_mesh is leaf.device_mesh
        assert_close(leaf.grad.to_local(), own_of(leaf, weight), f"gradient of {what} on rank {rank}")


@pytest.mark.slow
def test_every_pair():
    on_ranks(4, pairs)


def a_world_that_shrinks_and_grows(_):
    """Trains on four ranks, then on two, then on four: the same gradients as in one process."""
    four, two = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [1, 2])
    x = distribute_tensor(whole().requires_grad_(), four, [Shard(0)], sizes=[(2, 9, 5, 0)], src=0)
    y = x.sin().redistribute(two, [Shard(1)], sizes=[(1, 5)])
    y = y * y  # also on the ranks outside, of nothing
    z = y.redistribute(four, [Shard(0)])
    loss = (z * 3).sum()
    loss.backward()
    expected = whole().requires_grad_()
    (expected.sin().square() * 3).sum().backward()
    assert_close(x.grad.full_tensor(), expected.grad, "gradient")
    last = (x * 2).redistribute(two, [Shard(0)])
    if two.get_coordinate() is None:
        last.backward()
        with pytest.raises(RuntimeError, match=r"rank [03] is not in DeviceMesh\('cpu', \[1, 2\]\)"):
            last.sum()
    else:
        last.sum().backward()
    assert_close(x.grad.full_tensor(), expected.grad + 2, "gradient of a loss on two of four ranks")
    (double,) = torch.autograd.grad((x**3).redistribute(two, [Replicate()]), x, whole(), create_graph=True)
    double.backward(torch.ones_like(whole()))
    assert_close(x.grad.full_tensor(), expected.grad + 2 + 6 * whole() * whole(), "gradient of a gradient")


def test_a_world_that_shrinks_and_grows():
    on_ranks(4, a_world_that_shrinks_and_grows)


def maxima(_):
    mesh = DeviceMesh("cpu", [0, 1])
    local = whole() * (comm.rank("world") + 1) if comm.rank("world") < 2 else whole()[:0]
    x = ShardTensor.from_local(local, mesh, [Partial("max")], sharding_shapes="chunk", global_shape=whole().shape)
    y = x.redistribute(DeviceMesh("cpu", [2, 3]), [Replicate()])
    assert_close(y.to_local(), own_of(y, torch.maximum(whole(), whole() * 2)), "a maximum, not a sum")
    leaf = distribute_tensor(whole().requires_grad_(), DeviceMesh("cpu", [2, 3]), [Shard(0)], src=None)
    for op in ("max", "avg", "sum"):
        z = leaf.redistribute(DeviceMesh("cpu", [[0, 1, 2]]), [Shard(1), Partial(op)])
        if comm.rank("world") < 3:
            assert_close(z.full_tensor().detach(), whole(), f"a whole tensor as Partial({op!r})")
        (grad,) = torch.autograd.grad(z, leaf, whole().cos())
        assert_close(grad.to_local(), own_of(leaf, whole().cos()), f"the gradient of Partial({op!r})")


def test_a_maximum_is_never_added():
    on_ranks(4, maxima)


def counted(_):
    rank, four, two = comm.rank("world"), DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [0, 1])
    x = distribute_tensor(whole(), four, [Shard(0)], src=None)
    with comm.record() as calls:
        y = x.redistribute(two, [Shard(0)])
    assert verbs(calls) == ["exchange"]
    bytes_ = planned_bytes(x.to_local(), x._spec, y._spec, rank)
    assert sum(call.bytes for call in calls) == bytes_ == {0: 4, 1: 8, 2: 4, 3: 4}[rank] * 6 * 8
    named = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("domain",))
    with comm.record() as calls:
        z = x.redistribute(named, [Shard(0)])
    assert z.device_mesh is named
    assert z is not x
    assert verbs(calls) == []
    assert_close(z.to_local(), x.to_local(), "the same shards on a mesh of another name")


def test_what_travels_to_another_mesh():
    on_ranks(4, counted)


def told(_):
    mesh = DeviceMesh("cpu", [0, 1])
    if mesh.get_coordinate() is None:
        with pytest.raises(ValueError, match="is not in"):
            ShardTensor.from_local(torch.ones(0, 3), mesh, [Shard(0)])
    else:
        ShardTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)])


def test_a_rank_outside_cannot_infer_a_layout():
    on_ranks(3, told)


def of_nothing(_):
    """A model in the middle of another mesh's ranks: the others call the same functions, of nothing."""
    mesh, whole_mesh = DeviceMesh("cpu", [1, 2]), DeviceMesh("cpu", [0, 1, 2, 3])
    inside = mesh.get_coordinate() is not None
    weight, bias = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6).cos(), torch.ones(5, dtype=torch.float64)
    for source in (0, None):
        x = distribute_tensor(whole().requires_grad_(), mesh, [Shard(0)], sizes=[(11, 5)], src=source)
        y = F.layer_norm(F.linear(x, weight, bias).sin() + bias, (5,)).t()
        y = y.redistribute(mesh, [Shard(0)]) * 2
        assert y.to_local().shape == y._spec.local_shape and y.full_tensor().shape[1] == 16
        z = y.redistribute(whole_mesh, [Shard(1)])
        z.square().sum().backward()
        plain = whole().requires_grad_()
        expected = (F.layer_norm(F.linear(plain, weight, bias).sin() + bias, (5,)).t() * 2).square()
        expected.sum().backward()
        assert_close(z.square().full_tensor().detach(), expected.detach(), "value")
        assert_close(x.grad.to_local(), own_of(x, plain.grad), "gradient")
    rows = ShardTensor.from_local(torch.ones(3 if inside else 0, 6), mesh, [Shard(0)], shape=(6, 6))
    assert (rows + 1).to_local().shape == rows._spec.local_shape
    for function in (torch.sum, torch.amax, torch.Tensor.tolist, bool, lambda x: x[1:3]):
        if not inside:
            with pytest.raises(
                RuntimeError, match=r"of a ShardTensor: rank [03] is not in DeviceMesh\('cpu', \[1, 2\]"
            ):
                function(x.detach())


def test_ranks_outside_of_a_mesh_do_nothing():
    on_ranks(4, of_nothing)

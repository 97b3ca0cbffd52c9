"""The type checker inside of handlers: types of local tensors, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    sharded,
)
from neuronx_dist.shard_tensor.halo import HaloConfig, halo_padding
from neuronx_dist.spmd import I, S, SpmdTypeError
from tests.shard_tensor.test_handlers import _handlers_as_they_were  # noqa: F401 - a fixture

SIZES = (5, 3)


def on_dp(function, count=2):
    def rank():
        mesh = DeviceMesh.from_axes("dp")
        with spmd.SpmdTypeMode():
            return function(mesh)

    return threads.run(Mesh(count), rank)


def type_of(x):
    return spmd.get_local_type(x)["dp"]


def test_types_of_a_linear_layer():
    def step(mesh):
        x = distribute_tensor(torch.ones(4, 3, requires_grad=True), mesh, [Shard(0)], src=None)
        w = distribute_tensor(torch.ones(2, 3, requires_grad=True), mesh, src=None)
        y = F.linear(x, w)
        loss = y.square().mean()
        loss.backward()
        return [type_of(each.to_local()) for each in (x, w, y, loss, w.grad, x.grad)]

    assert on_dp(step) == [[S(0), I, S(0), I, I, S(0)]] * 2


def test_a_handler_that_forgets_a_reduction_is_reported():
    @sharded(torch.dot)
    def dot(func, types, args, kwargs):
        x, y = args
        return ShardTensor.from_local(func(x.to_local(), y.to_local()), x.device_mesh, [Replicate()])

    def step(mesh):
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)], src=None)
        return torch.dot(x, x)

    with pytest.raises(SpmdTypeError, match=r"\[Replicate\(\)\](.|\n)*P on dp, not I(.|\n)*test_checker\.py:"):
        on_dp(step)


def leaf(mesh, shape, placement, sizes=SIZES):
    x = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).view(shape).requires_grad_()
    return distribute_tensor(x, mesh, [placement], sizes=[sizes if isinstance(placement, Shard) else None], src=None)


def image(mesh):
    return leaf(mesh, (1, 2, 8, 8), Shard(2))


def to(placement, sizes=None):
    return lambda x: x.redistribute(placements=[placement], sizes=[sizes])


def product(x, w):
    return (x @ w).redistribute(placements=[Shard(0)], sizes=[(7, 1)])


def kernel(*shape):
    return lambda mesh: leaf(mesh, shape, Replicate())


def rows(placement):
    return lambda mesh: leaf(mesh, (8, 8), placement)


PROGRAMS = {
    "conv": (lambda x, w, b: F.conv2d(x, w, b, padding=1), S(2), image, kernel(3, 2, 3, 3), kernel(3)),
    "conv with stride": (lambda x, w: F.conv2d(x, w, stride=2), S(2), image, kernel(3, 2, 3, 3)),
    "conv_transpose": (lambda x, w: F.conv_transpose2d(x, w, stride=2), S(2), image, kernel(2, 3, 3, 3)),
    "pad": (lambda x: F.pad(x, (1, 1, 2, 2), mode="reflect"), S(2), image),
    "max_pool": (lambda x: F.max_pool2d(x, 3, 2), S(2), image),
    "avg_pool": (lambda x: F.avg_pool2d(x, 3, 1, 1), S(2), image),
    "adaptive pool": (lambda x: F.adaptive_avg_pool2d(x, 3), S(2), image),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), S(2), image),
    "other sizes": (to(Shard(0), (2, 6)), S(0), rows(Shard(0))),
    "another dim": (to(Shard(1), (2, 6)), S(1), rows(Shard(0))),
    "gathered": (to(Replicate()), I, rows(Shard(0))),
    "split": (to(Shard(1), (1, 7)), S(1), rows(Replicate())),
    "a sum, scattered": (
        product,
        S(0),
        rows(Shard(1)),
        rows(Shard(0)),
    ),
    "slice": (lambda x: x[2:7:2], S(0), rows(Shard(0))),
    "another mesh": (lambda x: x.redistribute(DeviceMesh("cpu", [1, 0]), [Shard(1)]), S(1), rows(Shard(0))),
    "maximum": (lambda x: x.amax(0), I, rows(Shard(0))),
    "logsumexp": (lambda x: x.logsumexp(0), I, rows(Shard(0))),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_types_of_uneven_shards(name):
    """The result, and each gradient, has the type of its layout, and nothing is taken for granted."""
    function, expected, *make = PROGRAMS[name]

    def rank():
        mesh = DeviceMesh.from_axes("dp")
        with spmd.SpmdTypeMode() as mode:
            operands = [each(mesh) for each in make]
            y = function(*operands)
            y.square().mean().backward()
            found = [type_of(each.to_local()) for each in (y, *(x.grad for x in operands))]
            wanted = [expected, *(type_of(x.to_local()) for x in operands)]
        return (
            found,
            wanted,
            [text for text, _ in mode.assumed if "known about its dims" not in text],
            list(mode.trusted),
        )

    for found, wanted, assumed, trusted in threads.run(Mesh(2), rank):
        assert found == wanted
        assert assumed == []
        assert trusted == []


def test_a_forgotten_reduction_behind_an_exchange_is_reported_with_its_line():
    @sharded(torch.trapezoid)
    def trapezoid(func, types, args, kwargs):
        x, mesh = args[0].to_local(), args[0].device_mesh
        x = halo_padding(x, mesh, HaloConfig(0, 0, 1, sizes=args[0]._spec.sizes[0]))
        own = x[1:].sum() + x[:-1].sum()
        return ShardTensor.from_local(own / 2, mesh, [Replicate()], sharding_shapes="chunk")  # the line

    with pytest.raises(SpmdTypeError, match=r"it is V on dp, not I") as caught:
        on_dp(lambda mesh: torch.trapezoid(leaf(mesh, (8,), Shard(0))))
    assert "test_checker.py" in str(caught.value)


def test_what_is_exchanged_must_be_shards_of_that_dim():
    def rank(mesh):
        x = leaf(mesh, (8, 5), Shard(1), (4, 1)).to_local()
        return halo_padding(x, mesh, HaloConfig(0, 0, 1, sizes=(8, 8)))

    with pytest.raises(SpmdTypeError, match=r"it is S\(1\) on dp, and .* are shards of that dim, S\(0\)"):
        on_dp(rank)

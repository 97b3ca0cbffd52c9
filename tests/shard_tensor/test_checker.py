"""The type checker inside of handlers: types of local tensors, and what it refuses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    fallback,
    sharded,
)
from neuronx_dist.shard_tensor.halo import HaloConfig, halo_padding
from neuronx_dist.spmd import I, P, S, SpmdTypeError
from tests.shard_tensor.test_handlers import _handlers_as_they_were  # noqa: F401 - a fixture
from tests.support.call_sites import find_sites, mutate

SIZES = (5, 3)
SITES = find_sites()


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


def test_types_of_a_function_that_runs_on_shards_by_its_rule():
    def step(mesh):
        x = distribute_tensor(torch.ones(4, 8, 3, 3, requires_grad=True), mesh, [Shard(0)], sizes=[(1, 3)], src=None)
        theta = distribute_tensor(torch.ones(4, 2, 3, requires_grad=True), mesh, [Shard(0)], sizes=[(1, 3)], src=None)
        with fallback("error"):
            y = F.grid_sample(F.pixel_shuffle(x, 2), F.affine_grid(theta, (4, 2, 5, 5), False), align_corners=False)
        y.square().mean().backward()
        return [type_of(each.to_local()) for each in (y, x.grad, theta.grad)]

    assert on_dp(step) == [[S(0), S(0), S(0)]] * 2


@pytest.mark.parametrize(("sizes", "sums"), [((5, 3), True), ((4, 4), False)])
def test_means_of_shards_are_a_sum_where_shards_are_uneven(sizes, sums):
    def step(mesh):
        x = distribute_tensor(torch.ones(8, 3, requires_grad=True), mesh, [Shard(0)], sizes=[sizes], src=None)
        shapes = x._spec.sharding_shapes()
        y = ShardTensor.from_local(x.to_local().mean(0), mesh, [Partial("avg")], sharding_shapes=shapes)
        total = y.redistribute(placements=[Replicate()])
        total.sum().backward()
        return [type_of(each.to_local()) for each in (y, total, x.grad)]

    assert on_dp(step) == [[P if sums else P("avg"), I, S(0)]] * 2


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


def channels(mesh):
    return leaf(mesh, (2, 8, 4), Shard(1))


def heads(placement):
    return lambda mesh: leaf(mesh, (1, 2, 8, 4), placement)


def positions(placement=None):
    """Indices of rows."""
    sizes = [(3, 1) if placement else None]
    return lambda mesh: distribute_tensor(
        torch.tensor([7, 0, 0, 3]), mesh, [placement or Replicate()], sizes=sizes, src=None
    )


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
    "linear, outputs split": (F.linear, S(1), rows(Replicate()), rows(Shard(0))),
    "linear, contracted": (F.linear, P, rows(Shard(1)), rows(Replicate())),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), S(1), rows(Shard(1)), kernel(8), kernel(8)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), S(1), channels, kernel(8), kernel(8)),
    "batch_norm": (lambda x: F.batch_norm(x, None, None, training=True), S(2), image),
    "prelu": (F.prelu, S(1), channels, kernel(8)),
    "softmax": (lambda x: x.softmax(0), S(0), rows(Shard(0))),
    "variance": (lambda x: x.var(0), I, rows(Shard(0))),
    "product": (lambda x: x.prod(0), I, rows(Shard(0))),
    "running sums": (lambda x: x.cumsum(0), S(0), rows(Shard(0))),
    "largest": (lambda x: x.topk(2, 0)[0], S(1), rows(Shard(0))),
    "sorted": (lambda x: x.sort(0)[0], S(0), rows(Shard(0))),
    "maximum of a dim": (lambda x: x.max(0)[0], I, rows(Shard(0))),
    "rows": (lambda x, i: x[i], I, rows(Shard(0)), positions()),
    "rows of other ranks": (lambda x, i: x[i], S(0), rows(Shard(0)), positions(Shard(0))),
    "elements": (lambda x: x.gather(0, torch.zeros(3, 8, dtype=torch.int64)), I, rows(Shard(0))),
    "embedding": (lambda w, i: F.embedding(i, w), S(0), rows(Replicate()), positions(Shard(0))),
    "embedding, table split": (lambda w, i: F.embedding(i, w), S(0), rows(Shard(0)), positions(Shard(0))),
    "embedding, ids whole": (lambda w, i: F.embedding(i, w), I, rows(Shard(0)), positions()),
    "masked": (lambda x: x[x > 0], S(0), rows(Shard(0))),
    "rows added": (lambda x, y: x.index_add(0, torch.tensor([1, 2, 3]), y), S(0), rows(Shard(0)), kernel(3, 8)),
    "roll": (lambda x: x.roll(3, 0), S(0), rows(Shard(0))),
    "cat": (lambda x, y: torch.cat([x, y]), S(0), rows(Shard(0)), rows(Shard(0))),
    "triangle": (lambda x: x.tril(), S(0), rows(Shard(0))),
    "unfold": (lambda x: x.unfold(0, 3, 1), S(0), rows(Shard(0))),
    "flattened": (lambda x: x.reshape(64), S(0), rows(Shard(0))),
    "dropout": (lambda x: F.dropout(x, 0.5), S(0), rows(Shard(0))),
    "nearest": (lambda x, y: torch.cdist(x, y).topk(2, largest=False)[0], S(0), rows(Shard(0)), rows(Shard(0))),
    "attention": (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), S(2), heads(Shard(2))),
    "attention, queries whole": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k),
        I,
        heads(Replicate()),
        heads(Shard(2)),
    ),
    "classes": (lambda x: F.cross_entropy(x, torch.arange(8)), I, rows(Shard(1))),
}
# What types cannot see of labels on other ranks, as in the layer's loss, which has the same kernel.
ASSUMED = {"classes": ["gather: that what it looks up for positions of other ranks over dp is masked"]}
TRUSTED = {"classes": ["that [8] is V on dp", "that [8] is P on dp"]}


@pytest.mark.parametrize("name", PROGRAMS)
def test_types_of_uneven_shards(name):
    """The result, and each gradient, has the type of its layout, and nothing else is taken for granted."""
    function, expected, *make = PROGRAMS[name]

    def rank():
        mesh = DeviceMesh.from_axes("dp")
        with spmd.SpmdTypeMode() as mode:
            operands = [each(mesh) for each in make]
            y = function(*operands)
            y.square().mean().backward()
            trained = [x for x in operands if x.requires_grad]
            found = [type_of(each.to_local()) for each in (y, *(x.grad for x in trained))]
            wanted = [expected, *(type_of(x.to_local()) for x in trained)]
        return (
            found,
            wanted,
            [text for text, _ in mode.assumed if "known about its dims" not in text],
            list(mode.trusted),
        )

    for found, wanted, assumed, trusted in threads.run(Mesh(2), rank):
        assert found == wanted
        assert assumed == ASSUMED.get(name, [])
        assert [text for text, _ in trusted] == TRUSTED.get(name, [])


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

    with pytest.raises(SpmdTypeError, match=r"it is S\(1\) on dp, but .* shards of that dim, S\(0\)"):
        on_dp(rank)


def left_out(original, x, axis, **types):
    return x


def twice(original, x, axis, **types):
    return original(original(x, axis, **types), axis, **types)


EVEN = (4, 4)


def even(placement):
    return lambda mesh: leaf(mesh, (8, 8), placement, EVEN)


# Call sites of shard_tensor that are rows of spmd's table, each with a program that reaches it.
BROKEN = {
    "gather:spmd.all_gather#1": (to(Replicate()), even(Shard(0))),
    "split:spmd.convert#1": (to(Shard(1)), even(Replicate())),
    "scatter_sum:spmd.reduce_scatter#1": (
        lambda x, w: (x @ w).redistribute(placements=[Shard(0)]),
        even(Shard(1)),
        even(Shard(0)),
    ),
    "transpose:spmd.all_to_all#1": (to(Shard(1)), even(Shard(0))),
    "total:spmd.all_reduce#1": (lambda x: x.sum(), rows(Shard(0))),
    "_summed:spmd.all_reduce#1": (lambda x, w: (x @ w).relu(), rows(Shard(1)), rows(Shard(0))),
    "_used:spmd.convert#1": (F.linear, rows(Shard(0)), rows(Replicate())),
    "for_shards:spmd.convert#1": (lambda x: F.layer_norm(x, (8,)), rows(Shard(1))),
    "scaled_by_rms:spmd.all_reduce#1": (lambda x: F.rms_norm(x, (8,)), rows(Shard(1))),
    "_with_total:spmd.convert#1": (lambda x: x.softmax(0), rows(Shard(0))),
    "_of_ranks_before:spmd.convert#1": (lambda x: x.cumsum(0), rows(Shard(0))),
}


@pytest.mark.each_value
@pytest.mark.parametrize("bug", [left_out, twice], ids=["left out", "twice"])
@pytest.mark.parametrize("site", BROKEN)
def test_a_collective_that_is_left_out_or_doubled_is_reported(site, bug):
    """Types show it, without any value."""
    function, *make = BROKEN[site]

    def step(mesh):
        function(*(each(mesh) for each in make)).square().mean().backward()

    with mutate(SITES[site], bug) as hits, pytest.raises(SpmdTypeError):
        on_dp(step)
    assert hits


class Model(torch.nn.Module):
    """Parallel layers and a softmax over the rows that dp shards."""

    def __init__(self, broken):
        super().__init__()
        self.broken = broken
        self.up = ColumnParallelLinear(8, 16, gather_output=False)
        self.down = RowParallelLinear(16, 8, input_is_parallel=True)

    def forward(self, x):
        x = ShardTensor.from_local(x, DeviceMesh.from_axes("dp"), [Shard(0)], sharding_shapes="chunk")
        y = self.down(self.up(x).tanh()).softmax(0)
        if self.broken:  # each rank's own part is taken for the whole
            return ShardTensor.from_local(
                y.to_local().square().sum(), y.device_mesh, sharding_shapes="chunk"
            ).to_local()
        return y.square().sum().full_tensor()


@pytest.mark.slow
def test_a_step_is_checked_before_it_is_started():
    """`spmd.check` plays all ranks with ShardTensors in the model, and weights of tp."""

    def report(broken):
        return spmd.check(lambda: Model(broken), torch.randn(4, 8), mesh=Mesh(4, tp=2))

    assert report(False).ok, str(report(False))
    assert "it is P on dp, not I" in str(report(True))
    with mutate(SITES["total:spmd.all_reduce#1"], left_out):
        assert "its layout requires I on dp, but the local tensor [] is P" in str(report(False))

"""Defects of torch 2.13's DTensor and physicsnemo 2.2.2's ShardTensor, by name: each case is right here, on any split.

In brackets: what theirs does.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, distributed
from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    distribute_module,
    distribute_tensor,
    fallback,
    points,
    scatter_tensor,
)
from neuronx_dist.shard_tensor.attention_method import attention_method
from tests.shard_tensor.support.cases import TOLERANCE, assert_close, on_ranks, verbs


def draw(*shape: int, shift: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64) + shift


def conv(**options):
    def function(x):
        kernel = options["kernel"]
        weight = torch.linspace(-1, 1, 3 * 4 * kernel * kernel, dtype=torch.float64).view(3, 4, kernel, kernel)
        return F.conv2d(x, weight, stride=options["stride"], padding=options["padding"])

    return function


def _ring(x):
    with attention_method("ring"):
        return F.scaled_dot_product_attention(x, x * 2, x + 1)


IMAGE = (2, 4, 16, 6)
ROWS = (16, 4)
# name: (function, shape, sharded dim, sizes). No collective carries as much as a gather of the tensor would.
DEFECTS = {
    # torch's DTensor
    "conv2d k3p1 (no halo, labelled Replicate, silent)": (conv(kernel=3, stride=1, padding=1), IMAGE, 2, (9, 7)),
    "mse_loss mean (gradient times the world size)": (lambda x: F.mse_loss(x, x.detach() * 0), (7, 3), 0, (4, 3)),
    "mean of 3/5 (1.5 instead of 1.625)": (lambda x: x.mean(), (8,), 0, (3, 5)),
    "avg_pool2d (all-gathers, no backward)": (lambda x: F.avg_pool2d(x, 2), IMAGE, 2, (9, 7)),
    "mean of 7 rows (all-gathers)": (lambda x: x.mean(0), (7, 3), 0, (4, 3)),
    "var of 7 rows (all-gathers)": (lambda x: x.var(0), (7, 3), 0, (4, 3)),
    "softmax (all-gathers)": (lambda x: x.softmax(0), ROWS, 0, (9, 7)),
    "layer_norm (all-gathers)": (lambda x: F.layer_norm(x, (16,)), (3, 16), 1, (9, 7)),
    "topk (all-gathers)": (lambda x: x.topk(3, 0)[0], ROWS, 0, (9, 7)),
    "roll (all-gathers)": (lambda x: x.roll(3, 0), ROWS, 0, (9, 7)),
    "max_pool (all-gathers)": (lambda x: F.max_pool2d(x, 3, 2, 1), IMAGE, 2, (9, 7)),
    "cdist (not implemented)": (lambda x: torch.cdist(x, x[:3]), ROWS, 0, (9, 7)),
    "unfold (not implemented)": (lambda x: x.unfold(0, 3, 2), ROWS, 0, (9, 7)),
    # physicsnemo's ShardTensor
    "conv2d k3s1p1": (conv(kernel=3, stride=1, padding=1), IMAGE, 2, (9, 7)),
    "conv2d k3s2p1 (9 rows for 8)": (conv(kernel=3, stride=2, padding=1), IMAGE, 2, (9, 7)),
    "conv2d k2s2p0 (7 rows for 8)": (conv(kernel=2, stride=2, padding=0), IMAGE, 2, (9, 7)),
    "conv2d k3s3p0 (wrong values, silent)": (conv(kernel=3, stride=3, padding=0), IMAGE, 2, (9, 7)),
    "conv2d k4s2p1 (MissingShardPatch)": (conv(kernel=4, stride=2, padding=1), IMAGE, 2, (9, 7)),
    "amax then mean (a maximum read as a sum)": (lambda x: x.amax(0).mean(), ROWS, 0, (9, 7)),
    "keepdim before the sharded dim": (lambda x: x.sum(0, keepdim=True) * 2, (4, 16), 1, (9, 7)),
    "a reduction before the sharded dim": (lambda x: x.sum(0) * 2, (4, 16), 1, (9, 7)),
    "align_corners": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        IMAGE,
        2,
        (9, 7),
    ),
    "padded max pooling": (lambda x: F.max_pool2d(x - 9, 3, 2, 1), IMAGE, 2, (9, 7)),
    "padded average pooling": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), IMAGE, 2, (9, 7)),
    "group_norm of a batch shard": (lambda x: F.group_norm(x, 2), (16, 4, 3), 0, (9, 7)),
    "group_norm at mean 1e4": (lambda x: F.group_norm(x + 1e4, 2), IMAGE, 2, (9, 7)),
    "var at mean 1e6": (lambda x: (x + 1e6).var(0), ROWS, 0, (9, 7)),
    "adaptive pooling": (lambda x: F.adaptive_avg_pool2d(x, (5, 3)), IMAGE, 2, (9, 7)),
    "permute": (lambda x: x.permute(2, 0, 1, 3) * 2, IMAGE, 2, (9, 7)),
    "cat": (lambda x: torch.cat([x, x * 2], 0), ROWS, 0, (9, 7)),
    "slice": (lambda x: x[3:14:2], ROWS, 0, (9, 7)),
    "flip": (lambda x: x.flip(0), ROWS, 0, (9, 7)),
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True),
        (1, 2, 16, 4),
        2,
        (9, 7),
    ),
    "grouped-query attention": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, 1:], enable_gqa=True),
        (1, 2, 16, 4),
        2,
        (9, 7),
    ),
    "a ring of shards that differ in size": (_ring, (1, 2, 16, 4), 2, (9, 7)),
    "radius search, backward": (lambda x: points.radius_search(x, x[2:9], 1.5, 6)[2], (16, 3), 0, (9, 7)),
}
RINGS = {"a ring of shards that differ in size", "radius search, backward"}  # several operands travel
# A rank knows its mean of 1e6 to eps * 1e6 = 2.2e-10, and the ranks' means differ by less than 1: the merged variance
# is known to 5e-10. Measured: ours is 4e-11 from torch, torch 6e-11 from the exact value, E[x^2] - E[x]^2 6e-4.
TOLERATED = {"var at mean 1e6": 1e-9}


@pytest.mark.parametrize("name", DEFECTS)
def test_it_is_right_here(name):
    function, shape, dim, sizes = DEFECTS[name]
    x = draw(*shape).requires_grad_()
    expected = function(x)
    weight = draw(*expected.shape)
    (grad,) = torch.autograd.grad((expected * weight).sum(), x)

    def rank(mesh):
        own = distribute_tensor(x.detach().requires_grad_(), mesh, [Shard(dim)], sizes=[sizes], src=None)
        with fallback("error"), comm.record() as calls:
            y = function(own)
            (actual,) = torch.autograd.grad((y * weight).sum(), own)
        assert isinstance(y, ShardTensor) and actual._spec is own._spec
        results = ((y.full_tensor(), expected, "value"), (actual.full_tensor(), grad, "gradient"))
        for value, wanted, what in results:
            assert_close(value.detach(), wanted.detach(), f"{name}: {what}", TOLERATED.get(name, TOLERANCE))
        whole = x.numel() * x.element_size()
        limits = {"all_gather": whole, "exchange": whole * max(sizes) // sum(sizes)}  # of the rank that sends most
        assert name in RINGS or all(call.bytes < limits.get(call.verb, whole) for call in calls), verbs(calls)

    on_ranks(2, rank)


def test_random_factories_work_on_cpu():
    """DTensor's rand and randn raise an AssertionError."""

    def make(mesh):
        for factory in (distributed.rand, distributed.randn):
            x = factory(7, 3, device_mesh=mesh, placements=[Shard(0)])
            assert x.shape == (7, 3) and x.to_local().shape == x._spec.local_shape

    on_ranks(2, make)


def test_another_mesh_is_never_ignored():
    """DTensor ignores the new mesh if the placements are equal."""

    def move(mesh):
        other = DeviceMesh("cpu", [1, 0])
        x = distribute_tensor(draw(7, 3), mesh, [Shard(0)], src=None)
        y = x.redistribute(other, [Shard(0)])
        assert y.device_mesh is other
        assert y.to_local().shape[0] == (3 if mesh.get_rank() == 0 else 4)
        assert_close(y.full_tensor(), draw(7, 3), "on another mesh")

    on_ranks(2, move)


def test_partition_functions_of_two_arguments_and_apply():
    """DTensor: TypeError (a third argument is wanted); "Couldn't swap Linear.weight"."""

    def distribute(mesh):
        seen = []
        distribute_module(nn.Linear(3, 2), mesh, lambda name, module: seen.append(name))
        assert seen == [""]
        module = nn.Linear(3, 2)
        module._apply(lambda x: distribute_tensor(x.detach(), mesh, [Replicate()], src=None))
        assert isinstance(module.weight, ShardTensor) and isinstance(module.weight, nn.Parameter)

    on_ranks(2, distribute)


def test_a_conv_is_labelled_by_what_it_is():
    def label(mesh):
        x = distribute_tensor(draw(*IMAGE), mesh, [Shard(2)], sizes=[(9, 7)], src=None)
        assert conv(kernel=3, stride=1, padding=1)(x).placements == (Shard(2),)

    on_ranks(2, label)


def test_dot_communicates_nothing_before_it_is_asked():
    def dot(mesh):
        x = distribute_tensor(draw(7), mesh, [Shard(0)], src=None)
        with comm.record() as calls:
            y = torch.dot(x, x)
        assert y.placements == (Partial(),) and verbs(calls) == []
        assert_close(y.full_tensor(), torch.dot(draw(7), draw(7)), "dot")

    on_ranks(2, dot)


def test_shapes_are_inferred_on_cpu():
    """physicsnemo pins memory there, and raises."""

    def infer(mesh):
        local = draw(7, 3).split([2, 5])[mesh.get_rank()]
        x = ShardTensor.from_local(local, mesh, [Shard(0)], sharding_shapes="infer")
        assert x.shape == (7, 3) and x._spec.sizes == ((2, 5),)

    on_ranks(2, infer)


def test_scatter_tensor_sends_each_rank_its_slice_only():
    """physicsnemo broadcasts the whole tensor."""

    def scatter(mesh):
        whole = draw(16, 4) if mesh.get_rank() == 0 else None
        with comm.record() as calls:
            x = scatter_tensor(whole, 0, mesh, [Shard(0)], (16, 4), torch.float64)
        assert sum(call.bytes for call in calls) <= 8 * 4 * 8
        assert_close(x.full_tensor(), draw(16, 4), "scattered")

    on_ranks(2, scatter)

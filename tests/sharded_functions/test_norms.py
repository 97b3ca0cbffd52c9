"""Moments and norms of shards are those of the whole, far from zero too, and what travels for them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.sharded_functions import norms
from tests.sharded_functions.shards import SIZES, assert_like_whole, randn, verbs_of


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e3])
def test_layer_norm_of_uneven_shards(sizes, mean):
    """Moments of any parts; plus the mean all digits are there, and `E[x^2] - E[x]^2` has none."""
    x = torch.round(randn(3, 8, 2) * 2.0**13) / 2.0**20 + mean
    parts = [("tp", [2 * size for size in sizes])]

    def of_shard(x):
        return norms.standardised(x, *norms.moments(x, (1, 2), parts), ["tp"], 16, 1e-5)

    assert_like_whole(of_shard, lambda x: F.layer_norm(x - mean, (8, 2)), x, 1, sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rms_norm_of_uneven_shards(sizes):
    ours = partial(norms.scaled_by_rms, dims=(1, 2), axes=["tp"], count=16, eps=None)
    assert_like_whole(ours, lambda x: F.rms_norm(x, (8, 2)), randn(3, 8, 2), 1, sizes)


def test_moments_over_two_axes():
    """One after the other: of the second, counts are those of all ranks of the first."""
    x, rows, columns = randn(5, 7), (4, 1), (2, 5)

    def rank():
        part = x.split(rows, 0)[comm.rank("dp")].split(columns, 1)[comm.rank("tp")]
        height = part.shape[0]
        return norms.moments(part, (0, 1), [("tp", [height * n for n in columns]), ("dp", [7 * n for n in rows])])

    for mean, squares in threads.run(Mesh(4, tp=2), rank):
        torch.testing.assert_close(mean.item(), x.mean().item(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(squares.item(), (x.var() * 34).item(), rtol=1e-12, atol=0)


EQUAL = {
    "layer": (lambda x: norms.layer_norm(x, 2, axis="tp", count=16), lambda x: F.layer_norm(x, (8, 2))),
    "rms": (lambda x: norms.rms_norm(x, 2, axis="tp", count=16), lambda x: F.rms_norm(x, (8, 2))),
    "group": (lambda x: norms.group_norm(x, 1, axis="tp", count=16), lambda x: F.group_norm(x, 1)),
    "batch": (
        lambda x: norms.batch_norm(x.transpose(1, 2), None, None, axis="tp", count=24).transpose(1, 2),
        lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    ),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", EQUAL)
def test_of_equal_shards(name, size):
    of_shard, of_whole = EQUAL[name]
    assert_like_whole(of_shard, of_whole, randn(3, 8, 2) + 1e3, 1, (8 // size,) * size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", EQUAL)
def test_half_precision_is_computed_in_float32(name, dtype):
    of_shard, of_whole = EQUAL[name]
    x = (randn(3, 8, 2) * 100 + 1000).to(dtype)
    pieces = threads.run(Mesh(2, tp=2), lambda: of_shard(x.chunk(2, 1)[comm.rank("tp")]))
    assert pieces[0].dtype == dtype
    expected = of_whole(x.float()).to(dtype)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("name", EQUAL)
def test_one_collective_in_each_pass(name):
    """Two numbers for each statistic, or the sum of squares."""
    forward, backward = verbs_of(EQUAL[name][0], randn(3, 8, 2), 1, 4)
    number = 2 if name == "batch" else 3
    verb = ("all_reduce", number) if name == "rms" else ("all_gather", 2 * number)
    assert (forward, backward) == ([verb], [("all_reduce", verb[1])])
    assert verbs_of(EQUAL[name][0], randn(3, 8, 2), 1, 1) == [[], []]

"""Operands that are sharded along labels that must be whole: their shards move to another label of the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist.shard_tensor import Partial, Replicate, Shard, distribute_tensor, report
from tests.shard_tensor.support.cases import assert_close, on_ranks

_INDEX = torch.arange(24).view(4, 6) * 5 % 7
MOVED: dict[str, Any] = {
    "a kernel": (lambda x, w: F.conv1d(x, w), (2, 3, 8), (5, 3, 4), 2, 1),
    "a kernel of groups": (lambda x, w: F.conv1d(x, w, groups=5), (2, 5, 8), (5, 1, 4), 2, 1),
    "coordinates": (torch.cdist, (7, 3), (6, 3), 1, 1),
    "the index of a scatter": (lambda x, y: x.scatter(0, _INDEX % 7, y), (7, 6), (4, 6), 0, 1),
}


@pytest.mark.parametrize("name", MOVED)
def test_shards_move_to_a_label_of_the_result(name):
    function, shape, other, dim, result_dim = MOVED[name]
    x, y = (torch.arange(torch.Size(s).numel(), dtype=torch.float64).view(s).sin() for s in (shape, other))
    expected = function(x, y)
    n = other[dim]

    def rank(mesh):
        a = distribute_tensor(x, mesh, [Replicate()], src=None)
        b = distribute_tensor(y, mesh, [Shard(dim)], sizes=[(n - 1, 0, 1)], src=None)
        with report() as r:
            z = function(a, b)
        assert z.placements == (Shard(result_dim),), z.placements
        assert not r.gathers and not r.notes and [call.call.verb for call in r.calls] == ["exchange"], (r, r.notes)
        assert_close(z.full_tensor(), expected, name)

    on_ranks(3, rank)


@pytest.mark.parametrize(("length", "placement"), [(5, Partial()), (13, Replicate())])
def test_shards_move_to_a_contracted_label_if_the_result_is_small(length, placement):
    x, w = torch.arange(4.0 * length).view(1, 4, length), torch.arange(12.0).view(1, 4, 3)

    def rank(mesh):
        kernel = distribute_tensor(w, mesh, [Shard(2)], sizes=[(1, 2)], src=None)
        y = F.conv1d(distribute_tensor(x, mesh, [Replicate()], src=None), kernel)
        assert y.placements == (placement,)
        assert_close(y.full_tensor(), F.conv1d(x, w), "conv1d")

    on_ranks(2, rank)


def test_a_label_that_another_mesh_dim_shards_is_left_to_it():
    x, w = torch.ones(2, 3, 8), torch.arange(60.0).view(5, 3, 4)

    def rank(mesh):
        kernel = distribute_tensor(w, mesh, [Shard(2), Shard(0)], src=None)
        with report() as r:
            y = F.conv1d(distribute_tensor(x, mesh, [Replicate(), Replicate()], src=None), kernel)
        assert y.placements == (Replicate(), Shard(1))
        assert len(r.notes) == 1 and r.notes[0][1].startswith("gathers 240 bytes"), r.notes
        assert_close(y.full_tensor(), F.conv1d(x, w), "conv1d")

    on_ranks(4, rank, (2, 2))


@pytest.mark.parametrize("deficient", [False, True])
def test_residuals_of_least_squares_if_all_ranks_matrices_have_full_rank(deficient):
    a, b = torch.eye(4, 2).repeat(5, 1, 1).double(), torch.arange(20.0).double().view(5, 4, 1)
    if deficient:
        a[4, :, 1] = 0
    expected = torch.linalg.lstsq(a, b, driver="gelsd")
    assert expected.residuals.numel() == (0 if deficient else 5)

    def rank(mesh):
        x, y = (distribute_tensor(z, mesh, [Shard(0)], sizes=[(3, 0, 2)], src=None) for z in (a, b))
        for actual, wanted in zip(torch.linalg.lstsq(x, y, driver="gelsd"), expected, strict=True):
            assert_close(actual.full_tensor(), wanted, "lstsq")

    on_ranks(3, rank)

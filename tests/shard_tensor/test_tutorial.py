"""Communication of the tutorial's first examples, and the placements that it prints."""

from __future__ import annotations

import torch

from neuronx_dist import comm
from neuronx_dist.shard_tensor import Shard, distribute_tensor, fallback, scatter_tensor
from tests.shard_tensor.support.cases import on_ranks
from tests.shard_tensor.support.selection import brute_force_knn


def _vectors(mesh, *shapes):
    is_source = mesh.get_rank() == 0
    return [
        scatter_tensor(torch.ones(shape) if is_source else None, 0, mesh, (Shard(0),), requires_grad=True)
        for shape in shapes
    ]


def test_example_0_adds_vectors_and_communicates_nothing():
    def run(mesh):
        a, b = _vectors(mesh, (1001,), (1001,))
        with comm.record() as calls:
            (a + b).backward(torch.ones(1001))
        return calls

    assert on_ranks(4, run) == [[]] * 4


def test_example_1_reduces_one_scalar():
    def run(mesh):
        a, b = _vectors(mesh, (1001,), (1001,))
        with comm.record() as calls:
            y = torch.dot(a, b).redistribute()
            y.backward()
        assert y.item() == 1001
        return [(call.verb, call.bytes) for call in calls]

    assert on_ranks(4, run) == [[("all_reduce", 4)]] * 4


def test_shards_that_disagree_keep_the_larger_one():
    """The tutorial's case: the larger tensor stays sharded, and the smaller one is gathered."""

    def run(mesh):
        a, b = _vectors(mesh, (2345, 3), (123, 3))
        a_view, b_view = a[None, :, :], b[:, None, :]
        printed = [(each.shape, each.placements) for each in (a_view, b_view)]
        with comm.record() as calls:
            difference = a_view - b_view
        printed.append((difference.shape, difference.placements))
        return printed, [(call.verb, call.bytes) for call in calls]

    for printed, calls in on_ranks(3, run):
        assert printed == [
            ((1, 2345, 3), (Shard(1),)),
            ((123, 1, 3), (Shard(0),)),
            ((123, 2345, 3), (Shard(1),)),
        ]
        assert calls == [("all_gather", 123 * 3 * 4)]


def _moved(points: int, queries: int, k: int, ranks: int) -> float:
    """Bytes of a rank where each rank has as many of the nearest: queries to all, candidates (a distance and an index)
    to the owners of their rows, then what these ask for (indices, and points of three numbers)."""
    return queries * 3 * 4 + 2 * queries * k * 4 + (ranks - 1) / ranks * queries / ranks * k * (4 + 12)


def test_the_unmodified_nearest_neighbours_move_candidates():
    """About 2 MB a rank at full size, where DTensor moves 10.1 GB: by a formula that a small size confirms."""
    points, queries, k, ranks = 2000, 160, 5, 8

    def run(mesh):
        generator = torch.Generator().manual_seed(0)
        x, y = (torch.randn(count, 3, generator=generator) for count in (points, queries))
        expected = brute_force_knn(x, y, k)
        x, y = (distribute_tensor(each, mesh, [Shard(0)], src=None) for each in (x, y))
        with fallback("error"), comm.record() as calls:
            neighbours = brute_force_knn(x, y, k)
        assert neighbours.placements == (Shard(0),) and torch.equal(neighbours.full_tensor(), expected)
        return [(call.verb, call.bytes) for call in calls]

    totals = []
    for calls in on_ranks(ranks, run):
        *fixed, asked, rows = calls
        candidates = queries * k * 4  # of every rank, of which one in `ranks` stays: distances, and indices as int32
        counts = ("all_gather", ranks * (ranks + 1) * 8)
        assert fixed == [
            ("all_gather", queries * 3 * 4),
            ("all_to_all", candidates),
            ("all_to_all", candidates),
            counts,
        ]
        assert asked[0] == rows[0] == "exchange" and rows[1] == 3 * asked[1]
        totals.append(sum(size for _, size in calls) - counts[1])
    predicted = _moved(points, queries, k, ranks)
    assert all(0.95 * predicted < total < 1.15 * predicted for total in totals), (totals, predicted)
    assert 1.9e6 < _moved(234_567, 12_345, 17, 8) < 3.0e6

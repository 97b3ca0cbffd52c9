"""What the tutorial's first examples communicate, and the placements that it prints."""

from __future__ import annotations

import torch

from neuronx_dist import comm
from neuronx_dist.shard_tensor import Shard, scatter_tensor
from tests.shard_tensor.support.cases import on_ranks


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
    """As the tutorial prints it, with the larger tensor in its shards, and the smaller one gathered."""

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

"""Shards with halos, and without them again."""

from __future__ import annotations

import itertools

import pytest
import torch

from neuronx_dist.comm import CommError
from neuronx_dist.shard_tensor.halo import HaloConfig, halo_padding, unhalo_padding
from tests.shard_tensor.support.cases import on_ranks

F64 = torch.float64


@pytest.mark.parametrize("halo, edge", [(1, 0), (2, 2), (5, 1), (0, 0)])
@pytest.mark.parametrize("sizes", [(4, 4), (3, 3, 3), (5, 1, 3), (1, 6, 0, 2)])
def test_a_halo_of_any_width(sizes: tuple[int, ...], halo: int, edge: int) -> None:
    bounds = [0, *itertools.accumulate(sizes)]
    n = bounds[-1]
    whole = torch.randn(2, n, dtype=F64)
    padded = torch.nn.functional.pad(whole, (edge, edge))
    is_equal = len(set(sizes)) == 1

    def rank(mesh):
        r = mesh.get_local_rank()
        config = HaloConfig(0, 1, halo, edge, sizes=None if is_equal else sizes)
        x = whole[:, bounds[r] : bounds[r + 1]].clone().requires_grad_()
        low, high = max(bounds[r] - halo, -edge), min(bounds[r + 1] + halo, n + edge)
        result = halo_padding(x, mesh, config)
        assert torch.equal(result.detach(), padded[:, low + edge : high + edge])
        assert torch.equal(unhalo_padding(result, mesh, config).detach(), x.detach())
        (grad,) = torch.autograd.grad(result.sum(), x)
        counts = [
            sum(max(a - halo, 0) <= p < min(b + halo, n) for a, b in itertools.pairwise(bounds))
            for p in range(bounds[r], bounds[r + 1])
        ]
        assert grad[0].tolist() == counts
        return len(counts)

    assert tuple(on_ranks(len(sizes), rank)) == sizes


def test_refusals() -> None:
    with pytest.raises(ValueError, match="edge_padding_size=2 must be from 0 to halo_size=1"):
        HaloConfig(0, 1, 1, 2)

    def rank(mesh):
        with pytest.raises(ValueError, match="sizes .2, 2, 2.: pass one size for each of the 2 ranks"):
            halo_padding(torch.zeros(2), mesh, HaloConfig(0, 0, 1, sizes=(2, 2, 2)))
        with pytest.raises(ValueError, match="does not match the plan, which has 2 positions"):
            halo_padding(torch.zeros(3), mesh, HaloConfig(0, 0, 1, sizes=(2, 2)))
        with pytest.raises(ValueError, match=r"dim 0 of shape \(5,\) is not the length of a shard with the halo"):
            unhalo_padding(torch.zeros(5), mesh, HaloConfig(0, 0, 1, sizes=(2, 2)))

    on_ranks(2, rank)


def test_without_sizes_shards_may_differ_where_none_is_shorter_than_the_halo() -> None:
    whole = torch.randn(11, dtype=F64)
    bounds = (0, 3, 8, 11)

    def rank(mesh):
        r = mesh.get_local_rank()
        x = whole[bounds[r] : bounds[r + 1]]
        result = halo_padding(x, mesh, HaloConfig(0, 0, 2))
        assert torch.equal(result, whole[max(0, bounds[r] - 2) : bounds[r + 1] + 2])
        assert torch.equal(unhalo_padding(result, mesh, HaloConfig(0, 0, 2)), x)

    on_ranks(3, rank)

    def refused(mesh):
        r = mesh.get_local_rank()
        with pytest.raises(CommError) as caught:
            halo_padding(whole[bounds[r] : bounds[r + 1]], mesh, HaloConfig(0, 0, 4))
        return "".join(getattr(caught.value, "__notes__", ()))

    assert any("pass sizes" in notes for notes in on_ranks(3, refused))


def test_physicsnemo_s_arguments() -> None:
    def rank(mesh):
        x = torch.arange(2.0) + 2 * mesh.get_local_rank()
        assert HaloConfig(0, 0, 1, 0, True, "a2a", (2, 2)).sizes == (2, 2)
        return [
            halo_padding(x, mesh, HaloConfig(0, 0, 1, communication_method=method)).tolist()
            for method in ("p2p", "a2a")
        ]

    assert on_ranks(2, rank) == [[[0.0, 1.0, 2.0]] * 2, [[1.0, 2.0, 3.0]] * 2]
    with pytest.raises(ValueError, match="communication_method='smoke': use one of p2p, a2a"):
        HaloConfig(0, 0, 1, communication_method="smoke")

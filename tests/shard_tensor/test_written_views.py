"""Writes in place into a tensor or a view of it, as autograd functions see them that know no ShardTensors."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist.shard_tensor import Replicate, Shard, distribute_tensor
from tests.shard_tensor.sharding import Doubled
from tests.shard_tensor.support.cases import on_ranks


def into_a_slice(y):
    y[1:3].mul_(5)
    return y


def into_the_source_of_a_view(y):
    view = y[1:4]
    y.mul_(3)
    return view


def into_another_view(y):
    one, other = y[1:4], y[2:5]
    one.mul_(3)
    return other


def into_a_view_of_a_view(y):
    y.transpose(0, 1)[0].mul_(3)
    return y


def into_what_a_view_ends_in(y):
    view = y.view(6, 2, 1)[..., 0]
    view += 1
    view *= 4
    return y


def into_a_view_without_a_handler(y):
    torch.hsplit(y, 2)[1].mul_(3)
    return y


def behind_a_view_without_a_handler(y):
    view = y.view(6, 1, 2).diagonal(0, 1, 2)
    y.mul_(3)
    return view


def into_itself(y):
    for same in (y.contiguous(), y.to(y.dtype), y.real, +y, y.type_as(y), y.unfold(1, 1, 1)):
        same.mul_(3)
    return y


def into_a_view_that_has_no_graph(y):
    with torch.no_grad():
        y.view(12).mul_(3)
    return y


def behind_another_function(y):
    before = Doubled.apply(y)
    y[...].mul_(5)
    return y + before


@pytest.mark.parametrize(
    "write",
    [
        into_a_slice,
        into_the_source_of_a_view,
        into_another_view,
        into_a_view_of_a_view,
        into_what_a_view_ends_in,
        into_a_view_without_a_handler,
        behind_a_view_without_a_handler,
        into_itself,
        into_a_view_that_has_no_graph,
        behind_another_function,
    ],
)
@pytest.mark.parametrize("placement, sizes", [(Shard(0), (4, 0, 2)), (Replicate(), None)])
def test_what_is_written_into_a_view_is_known_to_functions_of_others(write, placement, sizes):
    def loss(x):
        y = Doubled.apply(write(x * 2))
        return (y * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum()

    def run(mesh):
        values = torch.arange(12.0, dtype=torch.float64).view(6, 2)
        plain = values.clone().requires_grad_()
        expected = loss(plain)
        expected.backward()
        x = distribute_tensor(values, mesh, [placement], sizes=[sizes], src=None).requires_grad_()
        actual = loss(x)
        actual.backward()
        assert torch.equal(actual.full_tensor().detach(), expected.detach())
        assert torch.equal(x.grad.full_tensor(), plain.grad)

    on_ranks(3, run)


@pytest.mark.parametrize("sizes", [(4, 1), (4, 0, 1)])
def test_a_contiguous_copy_is_a_copy_on_ranks_with_one_position_too(sizes):
    def run(mesh):
        x = distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)], sizes=[sizes], src=None)
        x.t().contiguous().zero_()
        assert x.full_tensor().sum() == 15
        x[:4].contiguous().zero_()
        assert x.full_tensor().sum() == 3

    on_ranks(len(sizes), run)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.complex128])
@pytest.mark.parametrize("placement, sizes", [(Shard(0), (4, 0, 1)), (Shard(1), (2, 0, 4))])
def test_a_view_of_another_dtype_has_the_bytes_of_one_process(dtype, placement, sizes):
    def run(mesh):
        values = torch.arange(30.0, dtype=torch.float64).view(5, 6)
        x = distribute_tensor(values, mesh, [placement], sizes=[sizes], src=None)
        view = x.view(dtype=dtype)
        assert view.placements == x.placements and torch.equal(view.full_tensor(), values.view(dtype))
        assert x.view(dtype).shape == view.shape
        view.zero_()
        assert x.full_tensor().sum() == 0

    on_ranks(3, run)


def test_views_that_are_gone_are_forgotten():
    def run(mesh):
        x = distribute_tensor(torch.ones(6, 2), mesh, [Shard(0)], src=None).requires_grad_()
        y = x * 2
        for _ in range(500):
            y[1:3].t()
        return len(y._family)

    assert max(on_ranks(2, run)) <= 65

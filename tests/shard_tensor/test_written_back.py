"""Writing into views that hold a copy, since a sharded dim was gathered for them: the tensor they are of changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist.shard_tensor import Replicate, Shard, distribute_tensor, fallback
from tests.shard_tensor.support.cases import assert_close, on_ranks


def values() -> torch.Tensor:
    return torch.arange(1.0, 29).view(7, 4)


def _rows(x):
    for row in x:
        row.mul_(2)


def _stale(x):
    row = x[5]
    x.add_(1)
    row.mul_(2)


def _view_of_the_copy(x):
    x[5][1:].zero_()


def _twice(x):
    x[5, 2].add_(3)


def _items(x):
    x[5][2] = 9.0
    x[1][torch.tensor([0, 3])] = 8.0


def _foreach(x):
    torch._foreach_mul_([*x.unbind()], 2.0)


def _into(x):
    torch.add(x[1], x[2], out=x[3])


def _drawn(x):
    x[5].normal_(generator=torch.Generator().manual_seed(0))


def _data(x):
    x.data[5].zero_()


def _select(x):
    x.select(0, 6).fill_(3)
    x.select(1, 3).add_(x[:, 0])


def _of_one_row(x):
    x[3:4].squeeze(0).mul_(5)


def _diagonal(x):
    x.diagonal().zero_()


def _init(x):
    nn.init.zeros_(x[2])


WRITES = [_rows, _stale, _view_of_the_copy, _twice, _items, _foreach, _into, _drawn, _data, _select]
WRITES += [_of_one_row, _diagonal, _init]


@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("shape, dims", [((2,), (0,)), ((3,), (1,)), ((2, 2), (0, 1))], ids=["rows", "columns", "both"])
def test_a_view_of_a_sharded_dim_writes_its_tensor(write, shape, dims):
    expected = values()
    write(expected)

    def run(mesh):
        x = distribute_tensor(values(), mesh, [Shard(dim) for dim in dims], src=None)
        with fallback("gather"):
            write(x)
        assert x.placements == tuple(Shard(dim) for dim in dims)
        assert_close(x.full_tensor(), expected, "values")

    on_ranks(torch.Size(shape).numel(), run, shape)


def test_the_padding_row_of_a_sharded_vocabulary():
    def run(mesh):
        layer = nn.Embedding(9, 4, padding_idx=5)
        nn.init.ones_(layer.weight)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)], src=None))
        layer._fill_padding_idx_with_zero()
        expected = torch.ones(9, 4)
        expected[5] = 0
        assert_close(layer.weight.full_tensor().detach(), expected, "by torch")
        layer.weight.data[7].zero_()
        expected[7] = 0
        assert_close(layer.weight.full_tensor().detach(), expected, "by .data")

    on_ranks(2, run)


def test_a_clone_is_no_view():
    def run(mesh):
        x = distribute_tensor(values(), mesh, [Shard(0)], src=None)
        x[5].clone().zero_()
        (x[5] * 1).zero_()
        assert_close(x.full_tensor(), values(), "values")

    on_ranks(2, run)


def test_with_gradients_it_is_refused():
    def run(mesh):
        x = distribute_tensor(values().requires_grad_(), mesh, [Shard(0)], src=None)
        value = distribute_tensor(torch.ones(4, requires_grad=True), mesh, [Replicate()], src=None)
        for write in (lambda: (x * 1)[5].mul_(2), lambda: x.detach()[5].copy_(value)):
            with pytest.raises(RuntimeError, match=r"Write x\[i\] = value or x\[i:i\+1\]"):
                write()

    on_ranks(2, run)

"""Views that hold a copy, since a sharded dim was gathered for them: they can be read; writing into them is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist.shard_tensor import Replicate, Shard, distribute_tensor, fallback
from tests.shard_tensor.support.cases import assert_close, on_ranks


class Zeroed(torch.autograd.Function):
    """Writes its operand, and knows no ShardTensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.zero_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0


def values() -> torch.Tensor:
    return torch.arange(1.0, 29).view(7, 4)


def _rows(x):
    for row in x:
        row.mul_(2)


def _view_of_the_copy(x):
    x[5][1:].zero_()


def _view_by_another_function(x):
    torch.hsplit(x[5], 2)[1].zero_()


def _element(x):
    x[5, 2].add_(3)


def _item(x):
    x[5][2] = 9.0


def _items(x):
    x[1][torch.tensor([0, 3])] = 8.0


def _augmented(x):
    x[5] += 1


def _foreach(x):
    torch._foreach_mul_([*x.unbind()], 2.0)


def _into(x):
    torch.add(x[1], x[2], out=x[3])


def _drawn(x):
    x[5].normal_(generator=torch.Generator().manual_seed(0))


def _data(x):
    x.data[5].zero_()


def _detached(x):
    x[5].detach().zero_()


def _row(x):
    x.select(0, 6).fill_(3)


def _column(x):
    x.select(1, 3).add_(x[:, 0])


def _of_one_row(x):
    x[3:4].squeeze(0).mul_(5)


def _diagonal(x):
    x.diagonal().zero_()


def _init(x):
    nn.init.zeros_(x[2])


def _foreign(x):
    Zeroed.apply(x[5])


def _operator(x):
    torch.ops.aten.mul_.Scalar(x[5], 2.0)


def _optimizer(x):
    parameter = nn.Parameter(x[5])
    parameter.grad = parameter.detach().clone()
    torch.optim.SGD([parameter], 0.5).step()


def _fused_optimizer(x):
    parameter = nn.Parameter(x[5])
    parameter.grad = parameter.detach().clone()
    torch.optim.SGD([parameter], 0.5, fused=True).step()


OF_ROWS = [_rows, _view_of_the_copy, _item, _items, _augmented, _foreach, _into, _drawn]
OF_ROWS += [_data, _detached, _row, _of_one_row, _init, _foreign, _operator, _optimizer, _fused_optimizer]
WRITES = [*OF_ROWS, _view_by_another_function, _element, _column, _diagonal]
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any]] = {  # mesh, sharded dims, what of it is not refused
    "rows": ((2,), (0,), [_column, _diagonal]),
    "columns": ((3,), (1,), [*OF_ROWS, _view_by_another_function, _diagonal]),
    "both": ((2, 2), (0, 1), []),
}


@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__.strip("_"))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_is_refused_where_it_would_write_a_copy_and_is_torch_s_elsewhere(write, layout):
    shape, dims, written = LAYOUTS[layout]
    expected = values()
    if write in written:
        write(expected)

    def run(mesh):
        x = distribute_tensor(values(), mesh, [Shard(dim) for dim in dims], src=None)
        with fallback("gather"):
            if write in written:
                write(x)
            else:
                with pytest.raises(RuntimeError, match=r"this view is a copy, .* Write to x \(x\[i\] = x\[i\] \+ 1"):
                    write(x)
        assert_close(x.full_tensor(), expected, "values")

    on_ranks(torch.Size(shape).numel(), run, shape)


def _assign(x):
    x[5] = x[5] * 2


def _slice(x):
    x[5:6].mul_(2)


@pytest.mark.parametrize("repair", [_assign, _slice])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_repairs_write_what_torch_writes(repair, dim):
    expected = values()
    expected[5].mul_(2)

    def run(mesh):
        x = distribute_tensor(values(), mesh, [Shard(dim)], src=None)
        repair(x)
        assert_close(x.full_tensor(), expected, "values")
        copy = x[5].clone()
        copy.zero_()
        (x[5] * 1).zero_()
        assert_close(x.full_tensor(), expected, "values")

    on_ranks(2, run)


def test_with_gradients():
    def run(mesh):
        x = distribute_tensor(values().requires_grad_(), mesh, [Shard(0)], src=None)
        value = distribute_tensor(torch.ones(4, requires_grad=True), mesh, [Replicate()], src=None)
        y = x * 1
        for write in (lambda: y[5].mul_(2), lambda: x.detach()[5].copy_(value), lambda: Zeroed.apply(y[5])):
            with pytest.raises(RuntimeError, match=r"this view is a copy"):
                write()

    on_ranks(2, run)


def test_the_padding_row_of_a_sharded_vocabulary():
    """torch's own initialisation names the repair, and leaves the weight as it is."""

    def run(mesh):
        layer = nn.Embedding(9, 4, padding_idx=5)
        nn.init.ones_(layer.weight)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)], src=None))
        with pytest.raises(RuntimeError, match=r"fill_ in place on x\[i\]"):
            layer._fill_padding_idx_with_zero()
        assert (layer.weight.full_tensor() == 1).all()
        with torch.no_grad():
            layer.weight[5] = 0
        expected = torch.ones(9, 4)
        expected[5] = 0
        assert_close(layer.weight.full_tensor().detach(), expected, "by assignment")

    on_ranks(2, run)


@pytest.mark.parametrize("gradients", [True, False])
def test_a_copy_of_what_no_one_holds_is_written(gradients):
    """`x += positions`, after a picture became tokens: the picture, which torch's view shares, is gone."""

    def tokens(x):
        y = (x * 2).flatten(2).transpose(1, 2)
        y += torch.arange(6.0, dtype=torch.float64)[:, None]
        return y

    def run(mesh):
        values = torch.arange(36.0, dtype=torch.float64).view(2, 3, 2, 3)
        expected, x = values.clone().requires_grad_(), distribute_tensor(values, mesh, [Shard(3)], src=None)
        x.requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            y, whole = tokens(x), tokens(expected)
            assert_close(y.full_tensor().detach(), whole.detach(), "values")
            held = x * 2
            first = held.flatten(2)
            second = first.view(2, 3, 3, 2).flatten(1, 2)
            for view in (first, second):
                with pytest.raises(RuntimeError, match=r"this view is a copy"):
                    view.add_(1)
        if gradients:
            y.square().sum().backward()
            whole.square().sum().backward()
            assert_close(x.grad.full_tensor(), expected.grad, "gradient")

    on_ranks(2, run)

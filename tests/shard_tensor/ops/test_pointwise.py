"""Functions of single elements: casts by another tensor, and lists that are written in place."""

from __future__ import annotations

import functools

import pytest
import torch

from neuronx_dist.shard_tensor import Partial, Shard, ShardTensor, distribute_tensor
from tests.shard_tensor.sharding import Foreign
from tests.shard_tensor.support.cases import assert_close, on_ranks


def casts(mesh):
    """Casts with another tensor use its dtype alone: x has the same shape, layout and gradient as before."""
    whole = torch.linspace(0, 1, 12, dtype=torch.float64).view(4, 3)
    others = [
        distribute_tensor(torch.ones(5, 7), mesh, [Shard(1)], src=None)[2, 3],
        distribute_tensor(torch.ones(5, 1, 3), mesh, [Shard(0)], sizes=[(4, 1)], src=None),
        distribute_tensor(torch.ones(4, 3), mesh, [Shard(1)], sizes=[(2, 1)], src=None),
        ShardTensor.from_local(torch.ones(6), mesh, [Partial()], sharding_shapes="chunk"),
        torch.ones(9),
    ]
    for other in others:
        for cast in (
            lambda x, y: x.to(y),
            lambda x, y: x.to(tensor=y, copy=True),
            lambda x, y: x.type_as(y),
            lambda x, y: x.type_as(other=y),
        ):
            x = distribute_tensor(whole, mesh, [Shard(0)], sizes=[(1, 3)], src=None).requires_grad_()
            y = cast(x, other)
            assert y._spec is x._spec and y.dtype == y.to_local().dtype == torch.float32
            assert y.to_local().shape == x.to_local().shape
            torch.testing.assert_close(y.full_tensor(), whole.float())
            y.sum().backward()
            torch.testing.assert_close(x.grad.full_tensor(), torch.ones_like(whole))
            plain = cast(whole, other)
            assert type(plain) is torch.Tensor
            torch.testing.assert_close(plain, whole.float())
    summands = ShardTensor.from_local(whole, mesh, [Partial()], sharding_shapes="chunk")
    torch.testing.assert_close(summands.to(others[0]).full_tensor(), whole.float() * 2)


def test_casts_to_another_tensor():
    on_ranks(2, casts)


def lists(mesh):
    whole = torch.linspace(1, 2, 5, dtype=torch.float64)
    x = distribute_tensor(whole.clone().requires_grad_(), mesh, [Shard(0)], sizes=[(4, 1)], src=None)
    y, plain = x * 2, torch.ones(3)
    torch._foreach_mul_([plain, y], [torch.full((3,), 4.0), x.detach() * 0 + 3])
    assert torch.equal(plain, torch.full((3,), 4.0))
    Foreign.apply(y).sum().backward()
    assert_close(x.grad.full_tensor(), torch.full_like(whole, 6), "gradient through a foreign function")
    for write in (lambda y: torch._foreach_add_([y], 1.0), lambda y: torch._foreach_mul_([y], [x.detach()])):
        summands = ShardTensor.from_local(whole, mesh, [Partial()], sharding_shapes="chunk")
        with pytest.raises(ValueError, match=r"_foreach_..._ in place on .*Partial.*redistribute"):
            write(summands)
    plain = torch.ones(5, dtype=torch.float64)
    with pytest.raises(ValueError, match="_foreach_mul_ would write a ShardTensor's values to a plain"):
        torch._foreach_mul_([plain, x.detach()], [x.detach(), x.detach()])
    assert torch.equal(plain, torch.ones(5, dtype=torch.float64)) and torch.equal(x.full_tensor(), whole)


def test_lists_in_place():
    on_ranks(2, lists)


def lists_by_item(mesh, form):
    """Functions of lists that are not elementwise; what a function in place returns."""
    left, right = torch.linspace(1, 2, 20).view(5, 4), torch.linspace(-1, 1, 12).view(4, 3)
    x = distribute_tensor(left, mesh, [Shard(0)], sizes=[(4, 1)], src=None)
    y = distribute_tensor(right, mesh, [Shard(0)], src=None)
    if hasattr(torch, "_foreach_mm"):  # torch 2.9 lacks it, and `_foreach_powsum`
        (product,) = form("mm")([x], [y])
        torch.testing.assert_close(product.full_tensor(), left @ right)
        (total,) = torch._foreach_powsum([y], 3)
        torch.testing.assert_close(total.full_tensor(), right.abs().pow(3).sum())
    (norm,) = form("norm")([x])
    torch.testing.assert_close(norm.full_tensor(), left.norm())
    (largest,) = form("max")([y])
    torch.testing.assert_close(largest.full_tensor(), right.max())
    values = [x]
    result = form("mul_")(values, 2.0)
    assert result[0] is x
    torch.testing.assert_close(x.full_tensor(), 2 * left)


@pytest.mark.parametrize("public", [False, True])
def test_lists_by_item(public):
    if public:
        functions = pytest.importorskip("torch.foreach")
        on_ranks(2, lambda mesh: lists_by_item(mesh, functools.partial(getattr, functions)))
    else:
        on_ranks(2, lambda mesh: lists_by_item(mesh, lambda name: getattr(torch, f"_foreach_{name}")))

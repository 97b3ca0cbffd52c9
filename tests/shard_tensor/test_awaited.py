"""`redistribute(async_op=True)`: the values and gradients of the redistribution that waits, and when it waits."""

from __future__ import annotations

import itertools

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.shard_tensor import DeviceMesh, Partial, Replicate, Shard, distribute_tensor
from neuronx_dist.shard_tensor.awaited import Awaited
from tests.shard_tensor.sharding import Doubled
from tests.shard_tensor.support.cases import assert_close, on_ranks
from tests.support.pool import processes

LAYOUTS = [(Replicate(), None), (Shard(0), (5, 2)), (Shard(0), (0, 7)), (Shard(1), (3, 3)), (Partial(), None)]


def whole() -> torch.Tensor:
    return torch.arange(42, dtype=torch.float64).view(7, 6).sin()


def pairs(mesh):
    weight = whole().cos()
    for (src, src_sizes), (dst, dst_sizes) in itertools.product(LAYOUTS, repeat=2):
        what = f"{src} {src_sizes} -> {dst} {dst_sizes}"
        values, grads = [], []
        for async_op in (False, True):
            leaf = distribute_tensor(whole().requires_grad_(), mesh, [Replicate()], src=None)
            a = leaf.redistribute(placements=[src], sizes=[src_sizes])
            b = a.redistribute(placements=[dst], sizes=[dst_sizes], async_op=async_op)
            assert b.placements == (dst,) and b.shape == (7, 6)
            values.append((b * 2).full_tensor())
            values[-1].backward(weight)
            grads.append(leaf.grad.full_tensor())
        assert_close(values[1].detach(), whole() * 2, what)
        assert_close(values[1].detach(), values[0].detach(), what)
        assert_close(grads[1], grads[0], f"gradient of {what}")
        assert_close(grads[1], weight * 2, f"gradient of {what}")


def test_all_pairs_on_threads():
    on_ranks(2, pairs)


@pytest.mark.process
def test_all_pairs_on_processes():
    processes(2).run(on_processes, mesh={})


def on_processes():
    pairs(DeviceMesh("cpu", [0, 1]))


def waits(mesh):
    a = distribute_tensor(whole().requires_grad_(), mesh, [Shard(0)], src=None)
    with comm.record() as calls:
        b = a.redistribute(placements=[Replicate()], async_op=True)
    assert [call.verb for call in calls] == ["exchange"]
    assert isinstance(b, Awaited) and b._finish is not None and b.placements == (Replicate(),)
    with comm.record() as calls:
        b.to_local()
    assert not calls and b._finish is None
    assert torch.equal((b * 2 + b).detach().full_tensor(), whole() * 3)
    with torch.no_grad():
        b.mul_(2)
    assert torch.equal(b.detach().full_tensor(), whole() * 2)
    foreign = Doubled.apply(a.redistribute(placements=[Replicate()], async_op=True))
    foreign.sum().backward()
    assert_close(a.grad.full_tensor(), torch.full_like(whole(), 2), "through a foreign function")
    (grad,) = torch.autograd.grad(
        (a * a).redistribute(placements=[Replicate()], async_op=True).sum(), a, create_graph=True
    )
    (second,) = torch.autograd.grad(grad.sum(), a)
    assert_close(second.full_tensor(), torch.full_like(whole(), 2), "twice")
    with torch.no_grad():
        plain = distribute_tensor(whole(), mesh, [Shard(0)], src=None)
        c = plain.redistribute(placements=[Replicate()], async_op=True)
        plain.add_(1)
        with pytest.raises(RuntimeError, match="modified in place before the transfer finished"):
            c.to_local()


def test_the_first_use_waits():
    on_ranks(2, waits)

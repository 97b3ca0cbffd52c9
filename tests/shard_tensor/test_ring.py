"""Rings of tensors of any sizes: values, gradients, and what is refused."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.comm import CommError
from neuronx_dist.shard_tensor import DeviceMesh
from neuronx_dist.shard_tensor.ring import RingPassingConfig, perform_ring_iteration, perform_ring_iteration_async
from tests.shard_tensor.support.cases import on_ranks
from tests.support.pool import processes

SIZES = (2, 0, 3, 1)


def of(rank: int) -> torch.Tensor:
    return (torch.arange(SIZES[rank] * 2.0, dtype=torch.float64) + 10 * rank).view(SIZES[rank], 2)


@pytest.mark.parametrize("method", ["p2p", "a2a"])
@pytest.mark.parametrize("direction, step", [("forward", 1), ("backward", -1)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_turn_brings_every_shard_and_its_gradient_home(count: int, direction: str, step: int, method: str) -> None:
    """Rank r weighs what it gets of rank s by (r + 1): the gradient of s is the sum of these."""
    config = RingPassingConfig(0, count, ring_direction=direction, communication_method=method)

    def rank(mesh):
        own = mesh.get_local_rank()
        x = of(own).requires_grad_()
        current, loss = x, x.new_zeros(())
        for iteration in range(count):
            source = (own - step * iteration) % count
            assert torch.equal(current.detach(), of(source))
            loss = loss + (own + 1) * (current**2).sum()
            if iteration < count - 1:
                shape = of((source - step) % count).shape
                with comm.record() as calls:
                    current = perform_ring_iteration(current, mesh, config, recv_shape=shape)
                expected = 8 * max(of(source).numel(), shape.numel())
                assert [(call.verb, call.bytes) for call in calls] == [("exchange", expected)]
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        total = sum(range(1, count + 1))
        assert torch.equal(grad.detach(), 2 * total * of(own)) and (second == 2 * total).all()

    on_ranks(count, rank)


def test_a_tensor_travels_while_the_rank_computes() -> None:
    def rank(mesh):
        own = mesh.get_local_rank()
        handle = perform_ring_iteration_async(torch.full((3,), float(own)), mesh, RingPassingConfig())
        return handle.wait().tolist()

    assert on_ranks(3, rank) == [[2.0] * 3, [0.0] * 3, [1.0] * 3]


def abandoned() -> float:
    mesh = DeviceMesh.from_axes("dp")
    perform_ring_iteration_async(torch.ones(4), mesh, RingPassingConfig())
    y = torch.ones(())
    torch.distributed.all_reduce(y, group=mesh.get_group())
    return y.item()


@pytest.mark.process
def test_messages_that_nobody_awaits_stop_no_others() -> None:
    assert processes(2).run(abandoned, mesh={}, timeout=30) == [2.0, 2.0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="ring_direction='left': use one of forward, backward"):
        RingPassingConfig(ring_direction="left")
    with pytest.raises(ValueError, match="communication_method='smoke': use one of p2p, a2a"):
        RingPassingConfig(communication_method="smoke")

    def another_size(mesh):
        with pytest.raises(ValueError, match="mesh_size=3, but mesh dim 0 of .* has 2 ranks"):
            perform_ring_iteration(torch.ones(1), mesh, RingPassingConfig(0, 3))

    on_ranks(2, another_size)

    def another_shape(mesh):
        with pytest.raises(CommError, match="rank 0 sends 1 elements to rank 1, which expects 2"):
            perform_ring_iteration(torch.ones(1), mesh, RingPassingConfig(), [1 + mesh.get_local_rank()])

    on_ranks(2, another_shape)


def test_a_pair_of_a_buffer_and_works() -> None:
    """PhysicsNeMo's form, with a buffer for each other step; what was saved of an overwritten buffer is noticed."""

    def rank(mesh):
        own = mesh.get_local_rank()
        x = torch.full((2,), own + 1.0, requires_grad=True)
        buffers = [torch.empty(2), torch.empty(2)]
        current, seen = x, []
        for step in range(3):
            received, works = perform_ring_iteration_async(current, mesh, RingPassingConfig(), buffers[step % 2])
            assert received is buffers[step % 2] and len(works) == 1
            for work in works:
                work.wait()
            assert not received.requires_grad
            seen.append(received.tolist()[0])
            current = received
        assert seen == [1.0 + (own - step) % 3 for step in (1, 2, 3)]
        received, works = perform_ring_iteration_async(x, mesh, RingPassingConfig(), recv_shape=(1, 2))
        works[0].wait()
        assert received.tolist() == [[1.0 + (own - 1) % 3] * 2] and not received.requires_grad
        weight = torch.ones(2, requires_grad=True)
        product = weight * buffers[0]
        handle = perform_ring_iteration_async(x, mesh, RingPassingConfig(), buffers[0])
        arrived = handle.wait()
        (grad,) = torch.autograd.grad((arrived * (own + 1)).sum(), x)
        assert grad.tolist() == [1.0 + (own + 1) % 3] * 2 and not buffers[0].requires_grad
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()

    on_ranks(3, rank)

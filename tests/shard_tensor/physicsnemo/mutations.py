"""The smallest case for each call of a collective under PhysicsNeMo's names: an AssertionError if it is made wrong."""

from __future__ import annotations

import torch
from torch import nn

from neuronx_dist.comm import CommError
from neuronx_dist.shard_tensor import DistributedManager, sync_module_over_mesh
from neuronx_dist.shard_tensor.physicsnemo import primitives, reductions
from tests.shard_tensor.support.cases import assert_close, on_ranks

__all__ = ["compared_ranks", "fused", "losses", "mappings", "pieces", "shared_gradients", "summed_pieces"]

_SIZES = (3, 1)


def _whole() -> torch.Tensor:
    return torch.arange(1.0, 5.0, dtype=torch.float64)


def pieces() -> None:
    def run(mesh):
        x = _whole().split(_SIZES)[mesh.get_rank()].clone().requires_grad_()
        y = primitives.all_gather_v(x, _SIZES)
        assert_close(y.detach(), _whole(), "gathered")
        (grad,) = torch.autograd.grad((y * (mesh.get_rank() + 1)).sum(), x)
        assert_close(grad, torch.full_like(x, 3.0), "gradient")

    on_ranks(2, run)


def summed_pieces() -> None:
    def run(mesh):
        y = primitives.all_gather_v_bwd_wrapper(_whole() * (mesh.get_rank() + 1), _SIZES)
        assert_close(y, 3 * _whole().split(_SIZES)[mesh.get_rank()], "sum of pieces")

    on_ranks(2, run)


def mappings() -> None:
    def run(mesh):
        DistributedManager.initialize()
        rank = mesh.get_rank()
        x = _whole().requires_grad_()
        y = primitives.reduce_from_parallel_region(primitives.copy_to_parallel_region(x, None) * (rank + 1), None)
        assert_close(y.detach(), 3 * _whole(), "sum")
        part = primitives.scatter_to_parallel_region(y, 0, None)
        back = primitives.gather_from_parallel_region(part, 0)
        assert_close(back.detach(), y.detach(), "gathered")
        (grad,) = torch.autograd.grad((back * _whole()).sum(), x)
        assert_close(grad, 3 * _whole(), "gradient")

    on_ranks(2, run)


def fused() -> None:
    def run(mesh):
        total = reductions.fused_all_reduce([_whole() * (mesh.get_rank() + 1)])[0]
        assert_close(total, 3 * _whole(), "sum")

    on_ranks(2, run)


def losses() -> None:
    def run(mesh):
        DistributedManager.initialize()
        return reductions.reduce_loss(mesh.get_rank() + 1.0, mean=False)

    assert on_ranks(2, run) == [3.0, None]


def shared_gradients() -> None:
    def run(mesh):
        DistributedManager.initialize()
        net = nn.Linear(1, 1, bias=False).double()
        reductions.mark_module_as_shared(net, None)
        net(torch.full((1, 1), mesh.get_rank() + 1.0, dtype=torch.float64)).sum().backward()
        assert_close(net.weight.grad, torch.full((1, 1), 3.0, dtype=torch.float64), "gradient")

    on_ranks(2, run)


def compared_ranks() -> None:
    def run(mesh):
        try:
            sync_module_over_mesh(nn.Linear(1, 1 + (mesh.get_rank() == 3)), mesh, verify=True)
        except Exception as error:  # without the comparison another one, where unequal shapes are sent
            return "differs across the mesh" in str(error)

    try:
        found = on_ranks(4, run, (2, 2))  # rank 0 shares no group with rank 3
    except CommError:  # some ranks wait for others that have raised
        found = []
    assert found == [True] * 4

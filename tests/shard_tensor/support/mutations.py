"""The smallest case for each call of a collective in `shard_tensor`: an AssertionError if the call is made wrong."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist.shard_tensor import (
    DeviceMesh,
    Partial,
    Replicate,
    Shard,
    ShardTensor,
    distribute_tensor,
    scatter_tensor,
    sync_module_over_mesh,
)
from neuronx_dist.shard_tensor.attention_method import attention_method
from neuronx_dist.shard_tensor.moves import exchange
from neuronx_dist.weights.wrappers import TAKE_SHARDS
from tests.shard_tensor.support.cases import assert_close, on_ranks

__all__ = [
    "asked_rows",
    "masked_rows",
    "attention_by_ring",
    "attention_merged",
    "counted",
    "even_moves",
    "extremes",
    "gradients_together",
    "halos_by_one_program",
    "gradients_with_a_graph",
    "inferred_shapes",
    "local_part",
    "not_finite",
    "moved_to_another_mesh",
    "one_ranks_tensor",
    "parts_of_the_first_rank",
    "replicated_points",
    "running_totals",
    "summand",
    "summed",
    "sums_with_a_graph",
    "synchronised",
    "totals",
    "uneven_moves",
    "weights",
]

_UNEVEN = (3, 1)


def whole(*shape: int) -> torch.Tensor:
    return torch.linspace(1, 2, torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def _leaf(x: torch.Tensor, mesh: DeviceMesh, placement, sizes=None) -> ShardTensor:
    return distribute_tensor(x.requires_grad_(), mesh, [placement], sizes=[sizes], src=None)


def _moves(sizes):
    def move(mesh):
        for src, dst in [
            (Shard(0), Replicate()),
            (Replicate(), Shard(0)),
            (Shard(0), Shard(1)),
            (Shard(1), Shard(0)),
        ]:
            x = _leaf(whole(4, 4), mesh, src, sizes if isinstance(src, Shard) else None)
            y = x.redistribute(placements=[dst], sizes=[sizes if isinstance(dst, Shard) else None])
            own = whole(4, 4)
            if isinstance(dst, Shard):
                own = own.narrow(dst.dim, y.offsets[dst.dim], y.to_local().shape[dst.dim])
            assert_close(y.to_local().detach(), own, f"{src} -> {dst}")
            y.backward(whole(4, 4))
            grad = whole(4, 4)
            if isinstance(src, Shard):
                grad = grad.narrow(src.dim, x.offsets[src.dim], x.to_local().shape[src.dim])
            assert_close(x.grad.to_local(), grad, f"gradient of {src} -> {dst}")
        summands = whole(4, 4) * (mesh.get_rank() + 1)
        y = ShardTensor.from_local(summands, mesh, [Partial()], sharding_shapes="chunk").redistribute(
            placements=[Shard(0)], sizes=[sizes]
        )
        assert_close(y.to_local(), (whole(4, 4) * 3).narrow(0, y.offsets[0], y.to_local().shape[0]), "a scattered sum")

    return move


def even_moves() -> None:
    on_ranks(2, _moves((2, 2)))


def uneven_moves() -> None:
    on_ranks(2, _moves(_UNEVEN))


def weights() -> None:
    def step(mesh):
        x, w = _leaf(whole(4, 3), mesh, Shard(0), _UNEVEN), whole(2, 3).requires_grad_()
        y = F.linear(x, w)
        assert_close(y.to_local().detach(), F.linear(whole(4, 3), whole(2, 3)).split(_UNEVEN)[mesh.get_rank()], "y")
        y.backward(whole(4, 2))
        assert_close(w.grad, whole(4, 2).T @ whole(4, 3), "gradient of a weight")

    on_ranks(2, step)


def _gradients_together(create_graph):
    def step(mesh):
        x = _leaf(whole(4, 3), mesh, Shard(0), _UNEVEN)
        w, b = whole(2, 3).requires_grad_(), whole(2).requires_grad_()
        grads = torch.autograd.grad(F.linear(x, w, b).square(), (w, b), whole(4, 2), create_graph=create_graph)
        w_, b_ = whole(2, 3).requires_grad_(), whole(2).requires_grad_()
        expected = torch.autograd.grad(
            F.linear(whole(4, 3), w_, b_).square(), (w_, b_), whole(4, 2), create_graph=create_graph
        )
        for grad, each in zip(grads, expected):
            assert_close(grad.detach(), each.detach(), "gradient of a weight and its bias")

    return step


def gradients_together() -> None:
    on_ranks(2, _gradients_together(False))


def gradients_with_a_graph() -> None:
    on_ranks(2, _gradients_together(True))


def summed() -> None:
    def step(mesh):
        local = (whole(3) * (mesh.get_rank() + 1)).requires_grad_()
        y = ShardTensor.from_local(local, mesh, [Partial()], sharding_shapes="chunk").full_tensor()
        assert_close(y.detach(), whole(3) * 3, "a sum")
        y.backward(whole(3))
        assert_close(local.grad, whole(3), "its gradient")

    on_ranks(2, step)


def summand() -> None:
    def step(mesh):
        x = _leaf(whole(3), mesh, Replicate())
        y = x.redistribute(placements=[Partial()])
        assert_close(y.to_local().detach(), whole(3) * (mesh.get_rank() == 0), "a summand")

    on_ranks(2, step)


def totals() -> None:
    """Sums without a graph, and one that is part of a norm."""

    def step(mesh):
        x = _leaf(whole(4), mesh, Shard(0), _UNEVEN)
        assert_close(x.detach().sum().to_local(), whole(4).sum(), "a total")
        x.norm(3).backward()
        twin = whole(4).requires_grad_()
        twin.norm(3).backward()
        assert_close(x.grad.full_tensor(), twin.grad, "gradient of a norm")

    on_ranks(2, step)


def sums_with_a_graph() -> None:
    """A sum and a mean over a sharded dim."""

    def step(mesh):
        x = _leaf(whole(4), mesh, Shard(0), _UNEVEN)
        y = x.sum()
        assert_close(y.to_local().detach(), whole(4).sum(), "a total")
        y.backward()
        assert_close(x.grad.to_local(), torch.ones_like(x.to_local()).detach(), "its gradient")
        y = x.mean(0, keepdim=True)
        assert_close(y.to_local().detach(), whole(4).mean().view(1), "a mean")

    on_ranks(2, step)


def extremes() -> None:
    def step(mesh):
        x = _leaf(whole(4), mesh, Shard(0), _UNEVEN)
        assert_close(x.amax().to_local().detach(), whole(4).amax(), "a maximum")
        y = _leaf(torch.ones(4, dtype=torch.float64), mesh, Shard(0), _UNEVEN)
        y.amax().backward()
        assert_close(y.grad.to_local(), torch.full_like(y.to_local(), 0.25).detach(), "a gradient that is shared")

    on_ranks(2, step)


def counted() -> None:
    def step(mesh):
        x = distribute_tensor(whole(4), mesh, [Shard(0)], sizes=[_UNEVEN], src=None)
        assert torch.count_nonzero(x).item() == 4

    on_ranks(2, step)


def inferred_shapes() -> None:
    def step(mesh):
        x = ShardTensor.from_local(torch.ones(_UNEVEN[mesh.get_rank()]), mesh, [Shard(0)])
        assert x._spec.sizes == (_UNEVEN,)

    on_ranks(2, step)


def local_part() -> None:
    def step(mesh):
        w = _leaf(whole(4), mesh, Replicate())
        (w.to_local(grad_placements=[Partial()]) * (mesh.get_rank() + 1)).sum().backward()
        assert_close(w.grad.full_tensor(), torch.full((4,), 3.0, dtype=torch.float64), "summed over the ranks")

    on_ranks(2, step)


def one_ranks_tensor() -> None:
    def step(mesh):
        x = whole(4) if mesh.get_rank() == 1 else None
        try:
            y = scatter_tensor(x, 1, mesh, [Shard(0)], sizes=[_UNEVEN])
        except ValueError as error:
            raise AssertionError("the ranks were not told the shape") from error
        assert_close(y.to_local(), whole(4).split(_UNEVEN)[mesh.get_rank()], "a slice of one rank's tensor")
        z = distribute_tensor(whole(4) * (mesh.get_rank() + 1), mesh, [Replicate()], src=1)
        assert_close(z.to_local(), whole(4) * 2, "one rank's tensor")

    on_ranks(2, step)


def synchronised() -> None:
    def step(mesh):
        module = nn.Module()
        module.weight = nn.Parameter(whole(3) * (mesh.get_rank() + 1))
        sync_module_over_mesh(module, mesh)
        assert_close(module.weight.detach(), whole(3), "a parameter of one rank")

    on_ranks(2, step)


def parts_of_the_first_rank() -> None:
    """Checks that DistributedDataParallel broadcasts ShardTensors when it takes a module."""

    def step(_):
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        values = whole(4) * (1 + mesh.get_local_rank("dp"))
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(values, mesh["tp"], [Shard(0)]))
        wrapper = SimpleNamespace(process_group=mesh.communicator("dp"), parameters_to_ignore=set())
        TAKE_SHARDS["DistributedDataParallel"](wrapper, module, ["weight"])
        assert_close(module.weight.full_tensor().detach(), whole(4), "a parameter of two data-parallel ranks")

    on_ranks(4, step)


def _like_one_process(function, x, sizes=_UNEVEN):
    """Value and gradient of a function of a tensor that is sharded along dim 0."""
    expected = x.clone().requires_grad_()
    y = function(expected)
    y.backward(whole(*y.shape))

    def step(mesh):
        given = _leaf(x.clone(), mesh, Shard(0), sizes)
        actual = function(given)
        assert_close(actual.full_tensor().detach(), y.detach(), "value")
        actual.backward(whole(*y.shape))
        assert_close(given.grad.full_tensor(), expected.grad, "gradient")

    on_ranks(2, step)


def running_totals() -> None:
    _like_one_process(lambda x: x.cumsum(0), whole(4, 2))


def not_finite() -> None:
    """One rank's shard has an infinite gradient: all ranks are told."""

    def scale(mesh):
        grad = _leaf(whole(4), mesh, Shard(0)).detach()
        if mesh.get_rank() == 1:
            grad.to_local()[0] = torch.inf
        found = torch.zeros(())
        torch._amp_foreach_non_finite_check_and_unscale_([grad], found, torch.full((), 0.5))
        assert found.item() == 1

    on_ranks(2, scale)


def _attention(queries, mask=None):
    """Queries of `queries`' placement and size, against four keys that are sharded; `mask`: added, whole."""

    def step(mesh):
        q, k, v = (whole(1, 1, 4, 2) * scale for scale in (1, -2, 3))
        plain = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*plain, mask)
        expected.backward(whole(1, 1, 4, 2))
        split = [q, *(x.clone() for x in (k, v))]
        given = [
            _leaf(x, mesh, placement, _UNEVEN if isinstance(placement, Shard) else None)
            for x, placement in zip(split, (queries, Shard(2), Shard(2)))
        ]
        with attention_method("ring"):
            y = F.scaled_dot_product_attention(*given, mask)
        y.backward(whole(1, 1, 4, 2))
        for name, actual, other in (
            ("output", y, expected.detach()),
            *((f"gradient of {name}", x.grad, own.grad) for name, x, own in zip("qkv", given, plain)),
        ):
            if isinstance(actual.placements[0], Shard):
                other = other.narrow(2, actual.offsets[2], actual.to_local().shape[2])
            assert_close(actual.to_local().detach(), other, name)

    return step


def attention_by_ring() -> None:
    on_ranks(2, _attention(Shard(2)))


def attention_merged() -> None:
    on_ranks(2, _attention(Replicate()))


def attention_merged_with_a_mask() -> None:
    mask = torch.zeros(4, 4, dtype=whole(1).dtype)
    mask[1, 2:] = torch.finfo(mask.dtype).min
    on_ranks(2, _attention(Replicate(), mask))


def moved_to_another_mesh() -> None:
    def step(mesh):
        x = _leaf(whole(4, 2), mesh, Shard(0), _UNEVEN)
        y = x.redistribute(DeviceMesh("cpu", [1, 0]), [Shard(1)])
        assert_close(y.to_local().detach(), whole(4, 2)[:, 1 - mesh.get_rank()].view(4, 1), "a shard on another mesh")
        y.backward(whole(4, 2))
        assert_close(x.grad.to_local(), whole(4, 2).split(_UNEVEN)[mesh.get_rank()], "its gradient")

    on_ranks(2, step)


def asked_rows() -> None:
    def step(mesh):
        x = _leaf(whole(8, 2), mesh, Shard(0), (6, 2))
        index = distribute_tensor(torch.tensor([6, 0, 0, 2]), mesh, [Shard(0)], sizes=[(3, 1)], src=None)
        try:
            y = x[index]
        except Exception as error:
            raise AssertionError("the ranks did not agree on who asks whom") from error
        assert_close(y.full_tensor().detach(), whole(8, 2)[[6, 0, 0, 2]], "rows of other ranks")
        y.backward(torch.ones(4, 2, dtype=torch.float64))
        expected = torch.tensor([2.0, 0, 1, 0, 0, 0, 1, 0], dtype=torch.float64).split((6, 2))[mesh.get_rank()]
        assert_close(x.grad.to_local(), expected[:, None].expand(-1, 2), "their gradients")

    on_ranks(2, step)


def replicated_points() -> None:
    """Sharded over one mesh dim, indexed over both: what ranks of the other one use has its gradients added."""

    def step(mesh):
        x = distribute_tensor(
            whole(4, 2).requires_grad_(), mesh, [Replicate(), Shard(0)], sizes=[None, _UNEVEN], src=None
        )
        index = distribute_tensor(torch.tensor([[3, 0], [1, 3]]), mesh, [Shard(0), Shard(1)], src=None)
        x[index].backward(torch.ones(2, 2, 2, dtype=torch.float64))
        assert_close(
            x.grad.full_tensor()[:, 0], torch.tensor([1.0, 1.0, 0.0, 2.0], dtype=torch.float64), "added gradients"
        )

    on_ranks(4, step, (2, 2))


def masked_rows() -> None:
    def step(mesh):
        x = _leaf(whole(4), mesh, Shard(0), _UNEVEN)
        mask = distribute_tensor(whole(4) > 1.2, mesh, [Shard(0)], sizes=[_UNEVEN], src=None)
        try:
            y = x[mask].redistribute(placements=[Shard(0)], sizes=[(1, 2)])
        except Exception as error:
            raise AssertionError("the ranks did not agree on the sizes") from error
        assert_close(y.full_tensor().detach(), whole(4)[1:], "what a mask takes")

    on_ranks(2, step)


def halos_by_one_program() -> None:
    def step(mesh):
        x = _leaf(whole(1, 1, 6), mesh, Shard(2), (3, 3))
        y = F.conv1d(x, whole(1, 1, 3), padding=1)
        assert_close(y.full_tensor().detach(), F.conv1d(whole(1, 1, 6), whole(1, 1, 3), padding=1), "halos")
        y.backward(whole(1, 1, 6))
        plain = whole(1, 1, 6).requires_grad_()
        F.conv1d(plain, whole(1, 1, 3), padding=1).backward(whole(1, 1, 6))
        assert_close(x.grad.full_tensor(), plain.grad, "their gradients")

    with mock.patch.object(exchange, "in_one_program", lambda x: True):
        on_ranks(2, step)

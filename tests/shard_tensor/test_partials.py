"""Partial tensors of each reduction: what stays Partial without communication, its values, and its gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm, spmd
from neuronx_dist.comm import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.shard_tensor import DeviceMesh, Partial, Replicate, Shard, ShardTensor, distribute_tensor
from tests.shard_tensor.support.cases import assert_close, on_ranks, verbs

OPS = ("sum", "avg", "max", "min", "product")
LINEAR, EQUAL = ("sum", "avg"), ("avg", "max", "min")


def value(op: str, parts: torch.Tensor) -> torch.Tensor:
    """A tensor from what each rank has, `[ranks, ..]`."""
    if op in ("max", "min"):
        return getattr(parts, f"a{op}")(0)
    return {"sum": parts.sum(0), "avg": parts.mean(0), "product": parts.prod(0)}[op]


# name: (function of x, y in one layout and c, equal on the ranks; the reductions that stay; the result's, by x's)
FUNCTIONS = {
    "x + y": (lambda x, y, c: x + y, LINEAR, {}),
    "x - 2 y": (lambda x, y, c: torch.sub(x, y, alpha=2), LINEAR, {}),
    "x * y": (lambda x, y, c: x * y, ("product",), {}),
    "x / y": (lambda x, y, c: x / y, ("product",), {}),
    "maximum": (lambda x, y, c: torch.maximum(x, y), ("max",), {}),
    "minimum": (lambda x, y, c: x.minimum(y), ("min",), {}),
    "-x": (lambda x, y, c: -x, (*LINEAR, "max", "min"), {"max": "min", "min": "max"}),
    "clone": (lambda x, y, c: x.clone(), OPS, {}),
    "+x": (lambda x, y, c: +x, OPS, {}),
    "3 x": (lambda x, y, c: 3 * x, LINEAR, {}),
    "x / 3": (lambda x, y, c: x.div(3.0), LINEAR, {}),
    "x * inf": (lambda x, y, c: x * float("inf"), (), {}),
    "x + 1": (lambda x, y, c: x + 1, EQUAL, {}),
    "x - 1": (lambda x, y, c: x - 1, EQUAL, {}),
    "1 - x": (lambda x, y, c: 1 - x, (), {}),
    "1 / x": (lambda x, y, c: 1 / x, (), {}),
    "x + c": (lambda x, y, c: x + c, EQUAL, {}),
    "x - c of a row": (lambda x, y, c: x - c[0], EQUAL, {}),
    "c + x": (lambda x, y, c: c + x, ("avg",), {}),
    "c - x": (lambda x, y, c: c - x, ("avg",), {}),
    "x * c": (lambda x, y, c: x * c, LINEAR, {}),
    "c * x": (lambda x, y, c: c[:, :1] * x, LINEAR, {}),
    "x / c": (lambda x, y, c: x / c, (), {}),
    "c / x": (lambda x, y, c: c / x, (), {}),
    "floor(x / c)": (lambda x, y, c: torch.div(x, c, rounding_mode="floor"), (), {}),
    "x of more dims": (lambda x, y, c: x + c.unsqueeze(0), (), {}),
    "linear": (lambda x, y, c: F.linear(x, c), LINEAR, {}),
    "matmul": (lambda x, y, c: c.t() @ x, LINEAR, {}),
}


def parts_of(count: int) -> torch.Tensor:
    return torch.arange(count * 24, dtype=torch.float64).view(count, 6, 4).sin() + 1.5


def functions(mesh, placement_of):
    """Each function on tensors of each reduction, against the same functions in one process."""
    count, rank = mesh.shape[0], mesh.communicator(0).rank
    for op in OPS:
        for name, (function, stays, becomes) in FUNCTIONS.items():
            plain = [parts_of(count), parts_of(count).cos() + 2.5, parts_of(1)[0].sqrt()]
            plain = [x.clone().requires_grad_() for x in plain]
            expected = function(value(op, plain[0]), value(op, plain[1]), plain[2])
            weight = expected.detach().nan_to_num(0, 1, 1).cos()
            (expected * weight).sum().backward()
            placements = [Partial(op), *placement_of]
            rows = (distribute_tensor(torch.arange(6), mesh, [Replicate(), *placement_of], src=None)).to_local()
            own = [x.detach()[rank].index_select(0, rows).requires_grad_() for x in plain[:2]]
            x, y = (ShardTensor.from_local(z, mesh, placements) for z in own)
            c = distribute_tensor(plain[2].detach().clone().requires_grad_(), mesh, None, src=None)
            with comm.record() as calls:
                z = function(x, y, c)
            what = f"{name} of {op}"
            if name not in ("linear", "matmul") or not placement_of:
                assert (z.placements[0] == Partial(becomes.get(op, op))) == (op in stays), what
                assert (verbs(calls) == []) == (op in stays), f"{what}: {verbs(calls)}"
            assert_close(z.full_tensor().detach(), expected.detach(), what)
            (z * weight).sum().backward()
            for i, part in enumerate(own):
                grad = plain[i].grad if plain[i].grad is not None else torch.zeros_like(plain[i])
                actual = part.grad if part.grad is not None else torch.zeros_like(part)
                assert_close(actual, grad[rank].index_select(0, rows), f"gradient {i} of {what}")
            if plain[2].grad is not None:
                assert_close(c.grad.full_tensor(), plain[2].grad, f"gradient of c of {what}")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_functions_that_stay_partial(count):
    on_ranks(count, lambda mesh: functions(mesh, ()))


@pytest.mark.slow
def test_they_stay_partial_beside_shards():
    on_ranks(4, lambda mesh: functions(mesh, (Shard(0),)), (2, 2))


def writes(mesh):
    rank = mesh.communicator(0).rank
    for op in OPS:
        parts = parts_of(mesh.size())
        x = ShardTensor.from_local(parts[rank].clone(), mesh, [Partial(op)])
        with comm.record() as calls:
            if op in LINEAR:
                x.add_(ShardTensor.from_local(parts[rank].cos(), mesh, [Partial(op)]), alpha=2).mul_(3).div_(2)
                parts = (parts + 2 * parts.cos()) * 1.5
            elif op != "product":
                x += 1
                x.sub_(torch.ones(4, dtype=torch.float64) / 2)
                parts = parts + 0.5
        assert calls == [] and x.placements == (Partial(op),)
        assert_close(x.full_tensor(), value(op, parts), f"written {op}")
        with pytest.raises(ValueError, match="redistribute\\(\\) the tensor to Replicate first"):
            x.exp_()
        if op in ("max", "min"):
            with pytest.raises(ValueError, match="redistribute\\(\\) the tensor to Replicate first"):
                x.neg_()  # it would be of another reduction
        with comm.record() as calls:
            x.zero_()
        assert calls == [] and x.placements == (Partial(op),) and not x.full_tensor().any()
    local = parts_of(mesh.size())[rank].clone().requires_grad_()
    x = ShardTensor.from_local(local * 1, mesh, [Partial()])
    x.mul_(2)
    x.sin().sum().backward()
    total = (parts_of(mesh.size()).sum(0) * 2).cos() * 2
    assert_close(local.grad, total, "gradient through a write")


def test_writes_that_stay_partial():
    on_ranks(2, writes)


def added(mesh):
    """A sum over mesh dim 0, in shards along mesh dim 1, to which tensors are added in place."""
    rank = mesh.communicator(0).rank
    parts, bias, column, other = parts_of(2), parts_of(1)[0, 0], parts_of(1)[0, :, :1].cos(), parts_of(3)[1]
    plain = [x.clone().requires_grad_() for x in (parts, bias, column, other)]
    expected = (plain[0].sum(0) * 2 + plain[1] - 3 * plain[2] + 5 + 2 * plain[3]).sin()
    expected.square().sum().backward()
    rows = slice(0, 4) if mesh.communicator(1).rank == 0 else slice(4, 6)
    part = parts[rank, rows].clone().requires_grad_()
    x = ShardTensor.from_local(part * 2, mesh, [Partial(), Shard(0)], sharding_shapes={1: [(4, 4), (2, 4)]})
    b = bias.clone().requires_grad_()
    c = distribute_tensor(column, mesh, [Replicate(), Shard(0)], sizes=[None, (4, 2)], src=None).requires_grad_()
    d, e = (
        distribute_tensor(other, mesh, [Shard(1), Shard(0)], sizes=[sizes, (4, 2)], src=None).requires_grad_()
        for sizes in ((3, 1), (2, 2))
    )
    with comm.record() as calls:
        x += b
        x.sub_(c, alpha=3).add_(5)
        x += d
        x += e
    assert calls == [] and x.placements == (Partial(), Shard(0))
    y = x.sin()
    assert_close(y.full_tensor().detach(), expected.detach(), "value")
    y.square().sum().backward()
    for name, actual, wanted in (
        ("part", part.grad, plain[0].grad[rank, rows]),
        ("bias", b.grad, plain[1].grad),
        ("column", c.grad.full_tensor(), plain[2].grad),
        ("uneven shards", d.grad.full_tensor() * 2, plain[3].grad),
        ("even shards", e.grad.full_tensor() * 2, plain[3].grad),
    ):
        assert_close(actual, wanted, f"gradient of the {name}")


def test_tensors_are_added_to_a_sum_in_place():
    on_ranks(4, added, (2, 2))


def test_a_sum_stays_a_sum_under_the_checker():
    def rank():
        mesh = DeviceMesh.from_axes("dp")
        with spmd.SpmdTypeMode():
            x = distribute_tensor(parts_of(1)[0].requires_grad_(), mesh, [Shard(0)], src=None)
            summand = x.to_local().sum(0)
            y = ShardTensor.from_local(summand, mesh, [Partial()])
            assert (y + y * 2).placements == (Partial(),)
            assert_close((y + y * 2).full_tensor().detach(), parts_of(1)[0].sum(0) * 3, "sum")
            y = ShardTensor.from_local(summand * 1, mesh, [Partial()])
            for sizes in ((2, 2), (3, 1)):  # parts of the first row, and it again: nothing is gathered
                y += distribute_tensor(parts_of(1)[0, 0], mesh, [Shard(0)], sizes=[sizes], src=None)
            y += parts_of(1)[0, 0]
            y.sum().backward()
            assert_close(y.full_tensor().detach(), parts_of(1)[0].sum(0) + 3 * parts_of(1)[0, 0], "written sum")
            for op in ("avg",):
                z = x.sum(0).redistribute(placements=[Partial(op)])
                assert_close((z + 1).full_tensor().detach(), parts_of(1)[0].sum(0) + 1, op)

    threads.run(Mesh(2), rank)


def test_a_sum_over_infinite_parts_is_reduced_first() -> None:
    """Parts of 1 and -2, divided by 0, have no sum; the quotient of the sum is -inf."""

    def rank(mesh):
        x = ShardTensor.from_local(torch.tensor([1.0, -2.0])[mesh.get_rank() :][:1], mesh, [Partial()])
        return [(x / divisor).full_tensor().item() for divisor in (0, torch.zeros(1))]

    assert on_ranks(2, rank) == [[-float("inf")] * 2] * 2


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_that_no_layout_describes_is_refused(op) -> None:
    def rank(mesh):
        part = torch.tensor([[1.0, 5.0], [3.0, 2.0]])[mesh.get_rank()]
        x = ShardTensor.from_local(part.clone(), mesh, [Partial(op)]).requires_grad_()
        (x.redistribute(placements=[Replicate()]) * torch.tensor([1.0, 10.0])).sum().backward()
        inner = part.clone().requires_grad_()
        y = ShardTensor.from_local(inner, mesh, [Partial(op)]).redistribute(placements=[Replicate()])
        (y * torch.tensor([1.0, 10.0])).sum().backward()
        if op in LINEAR:
            return [n * (2 if op == "avg" else 1) for n in x.grad.full_tensor().tolist()]
        with pytest.raises(RuntimeError, match="differs between the ranks, .* require the gradient of the local"):
            _ = x.grad
        with pytest.raises(RuntimeError, match="differs between the ranks"):
            torch.autograd.grad(x.redistribute(placements=[Replicate()]).sum(), x)
        return inner.grad.tolist()

    parts = torch.tensor([[1.0, 5.0], [3.0, 2.0]], requires_grad=True)
    (value(op, parts) * torch.tensor([1.0, 10.0])).sum().backward()
    expected = [[1.0, 10.0]] * 2 if op in LINEAR else parts.grad.tolist()
    assert on_ranks(2, rank) == expected

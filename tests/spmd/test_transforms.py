"""`torch.func` and forward-mode AD over the operators: derivatives, batches, and what verbs refuse."""

from __future__ import annotations

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

from neuronx_dist import comm, spmd
from neuronx_dist.spmd import I, P, R, S, V
from neuronx_dist.spmd.rows import ROWS
from tests.support.conformance import TP2
from tests.support.pool import processes

TYPES = {"R": (R, R), "I": (I, I), "V": (V, V), "P": (P, P), "S": (S(0), S(1))}  # as src, as dst


def operators():
    """Every row, as a function of a tensor `[2, 4, 6]`."""
    for name, src, dst in ROWS:
        options = {"expert_mode": True} if name in ("convert", "reinterpret") else {}
        to = S(0) if dst == "S" and src != "S" else TYPES[dst][1]
        operator, types = getattr(spmd, name), dict(src=TYPES[src][0], dst=to)
        yield f"{name}({src}, {dst})", lambda x, f=operator, t=types, o=options: f(x, "tp", **t, **o)


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(comm.rank("tp")), dtype=torch.float64)


def same(a, b):
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-12)


def derivatives():
    x, tangent = numbers(2, 2, 4, 6)
    for name, operator in operators():

        def function(x, operator=operator):
            return operator(x * x)

        expected = operator(2 * x * tangent)  # operators are linear
        value, derivative = func.jvp(function, (x,), (tangent,))
        assert same(value, function(x)) and same(derivative, expected), name
        with forward_ad.dual_level():
            result = forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent)))
            assert same(result.tangent, expected), name

        leaf = x.clone().requires_grad_()
        grad = function(x).sin()
        function(leaf).backward(grad)
        assert same(func.vjp(function, x)[1](grad)[0], leaf.grad), name
        assert same(func.grad(lambda x, f=function, g=grad: (f(x) * g).sum())(x), leaf.grad), name

        _, second = func.jvp(func.grad(lambda x, f=function: f(x).pow(3).sum()), (x,), (tangent,))
        step = 1e-5
        ends = []
        for sign in (1, -1):
            leaf = (x + sign * step * tangent).requires_grad_()
            ends.append(torch.autograd.grad(function(leaf).pow(3).sum(), leaf)[0])
        assert torch.allclose(second, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-6), name


def test_every_operator_has_its_derivatives():
    assert len(list(operators())) == len(ROWS)
    processes(2).run(derivatives, mesh=dict(tp=2))


def batches():
    batch = numbers(3, 2, 4, 6)
    for name, operator in operators():
        expected = torch.stack([operator(x) for x in batch])
        assert same(func.vmap(operator)(batch), expected), name
        moved = func.vmap(operator, in_dims=-1, out_dims=1)(batch.movedim(0, -1))
        assert same(moved, expected.movedim(0, 1)), name
        with comm.record() as calls:
            func.vmap(operator)(batch)
        with comm.record() as one:
            operator(batch[0])
        assert len(calls) == len(one), f"{name}: one collective for the whole batch"
        per_sample = func.vmap(func.grad(lambda x, f=operator: f(x * x).sum()))(batch)
        leaf = batch.clone().requires_grad_()
        sum(operator(x * x).sum() for x in leaf).backward()
        assert same(per_sample, leaf.grad), name
        function, x = (lambda x, f=operator: f(x * x)), batch[0]
        out, pullback = func.vjp(function, x)
        tangent, grad = torch.ones_like(x), torch.ones_like(out)  # equal on all ranks, as the basis of a jacobian is
        columns, rows = func.jacfwd(function)(x), func.jacrev(function)(x)
        assert same(columns.flatten(out.dim()).sum(-1), func.jvp(function, (x,), (tangent,))[1]), name
        assert same(rows.flatten(0, out.dim() - 1).sum(0), pullback(grad)[0]), name


def test_vmap_is_one_collective_of_the_batch():
    processes(2).run(batches, mesh=dict(tp=2))


def inplace():
    x = numbers(4)

    def function(x):
        return spmd.all_reduce(x * 2, "tp", dst=I, inplace=True)

    assert same(func.jvp(function, (x,), (x,))[1], function(x))
    assert same(func.jvp(lambda x: spmd.all_gather(x, "dp", src=V, dst=R), (x,), (x,))[1], x.unsqueeze(0))


def test_inplace_and_an_axis_of_one_rank():
    processes(2).run(inplace, mesh=dict(tp=2))


VERBS = {
    "all_reduce": lambda x: comm.all_reduce(x, "tp"),
    "all_gather": lambda x: comm.all_gather(x, "tp"),
    "reduce_scatter": lambda x: comm.reduce_scatter(x, "tp"),
    "all_to_all": lambda x: comm.all_to_all(x, "tp"),
    "permute": lambda x: comm.permute(x, "tp", [(0, 1)]),
    "broadcast": lambda x: comm.broadcast(x, "tp"),
    "send": lambda x: comm.send(x, "tp", dst=1),
}


def dual(function, x):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(x, x))


TRANSFORMS = {
    "tangent": lambda function, x: func.jvp(function, (x,), (x,)),
    "tangent ": dual,
    "batched": lambda function, x: func.vmap(function)(x.expand(3, *x.shape)),
    "batched ": lambda function, x: func.vmap(func.grad(lambda y: function(y).sum()))(x.expand(3, *x.shape)),
    "tangent  ": lambda function, x: func.jvp(func.grad(lambda y: function(y).sum()), (x,), (x,)),
}


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda name: name.replace(" ", "_"))
@pytest.mark.parametrize("verb", [*VERBS, "list"])
def test_verbs_refuse_what_they_would_leave_out(verb, transform):
    function = VERBS.get(verb, lambda x: comm.all_reduce([x, x], "tp")[0])
    name = "all_reduce" if verb == "list" else verb
    refusal = rf"comm.{name} of a tensor that .*{transform.strip()}.*spmd"
    with comm.as_rank(TP2, 0), pytest.raises(comm.CommError, match=refusal):
        TRANSFORMS[transform](function, torch.ones(4))


def test_verbs_take_constants_and_values_under_grad():
    with comm.as_rank(TP2, 0):
        constant = torch.ones(3)
        result, tangent = func.jvp(lambda x: x * comm.all_reduce(constant, "tp"), (constant,), (constant,))
        assert result.tolist() == tangent.tolist() == [2.0] * 3
        grad, metric = func.grad(lambda x: ((x * x).sum(), comm.all_reduce(x, "tp")), has_aux=True)(constant)
        assert grad.tolist() == metric.tolist() == [2.0] * 3

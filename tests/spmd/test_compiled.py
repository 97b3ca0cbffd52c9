"""Operators and declarations in compiled code."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuronx_dist import comm, spmd
from neuronx_dist.parallel_layers import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from tests.spmd.test_transforms import numbers, operators
from tests.support.conformance import TP2
from tests.support.pool import processes


def forward_and_backward():
    for name, operator in operators():
        torch.compiler.reset()  # they are one function to the compiler
        results = []
        for function in (operator, torch.compile(operator, backend="aot_eager", fullgraph=True)):
            x = numbers(2, 4, 6).requires_grad_()
            y = function(x)
            y.backward(y.detach().sin())
            results.append((y.detach(), x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results)), name


def test_every_operator_is_that_of_eager_code():
    processes(2).run(forward_and_backward, mesh=dict(tp=2))


def test_declarations_do_nothing():
    def function(x):
        x = spmd.assert_type(x, {"tp": S(0)})
        x = spmd.trust(x * 2, "tp", V)
        x = spmd.forget(spmd.local(x), "tp")
        with spmd.no_typecheck():
            x = x + 1
        assert not spmd.has_local_type(x)
        return spmd.gradient(spmd.trust(x, "tp", P), x)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with comm.as_rank(TP2, 0):
        x = spmd.assert_type(torch.ones(4), {"tp": R})
        assert torch.equal(compiled(x), torch.full((4,), 3.0))
        assert spmd.get_local_type(x) == {"tp": R}, "what eager code declared stays"


def test_a_region_and_its_types_are_checked_as_it_is_written():
    def function(x):
        return spmd.all_reduce(x, "tp", src=P, dst=I)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    with comm.as_rank(TP2, 0):
        comm.communicator("tp")
        partial, replicated = (spmd.assert_type(torch.ones(3), {"tp": spmd_type}) for spmd_type in (P, R))
        compiled(partial)
        with spmd.SpmdTypeMode():
            assert spmd.get_local_type(compiled(partial)) == {"tp": I}
            with pytest.raises(SpmdTypeError, match="all_reduce"):
                compiled(replicated)
        compiled(replicated)


class Doubled(nn.Module):
    """Two parallel layers; if `wrong`, with a sum over a complete result."""

    def __init__(self, wrong):
        super().__init__()
        self.first = ColumnParallelLinear(4, 8, gather_output=False)
        self.second = RowParallelLinear(8, 4, input_is_parallel=True)
        self.wrong = wrong

    def forward(self, x):
        y = self.second(self.first(x))
        return (spmd.all_reduce(y, "tp", src=P, dst=I) if self.wrong else y).sum()


@pytest.mark.parametrize("wrong", [False, True])
def test_a_compiled_model_is_checked_before_it_is_trained(wrong):
    def model():
        module = Doubled(wrong)
        module.compile(backend="aot_eager", fullgraph=True)
        return module

    report = spmd.check(model, {"x": torch.zeros(2, 4)}, TP2)
    assert report.ok is not wrong
    assert not wrong or "all_reduce" in str(report)

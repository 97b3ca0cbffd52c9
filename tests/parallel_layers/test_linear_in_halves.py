"""Linear layers whose backward a pipeline divides: each half computes its own products, and nothing is sent twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import ColumnParallelLinear, RowParallelLinear
from neuronx_dist.pipeline.run.halves import divide
from tests.parallel_layers.layer_parity import close
from tests.support.counting import Flops

F64 = torch.float64
SP = dict(sequence_parallel_enabled=True, sequence_dimension=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("layer_class", [ColumnParallelLinear, RowParallelLinear])
def test_a_divided_backward(layer_class: Any, sequence_parallel: bool, bias: bool) -> None:
    """One product in each half; with sequence parallelism what a row gathers for one half serves the other."""
    column = layer_class is ColumnParallelLinear
    options: dict[str, Any] = dict(gather_output=False) if column else dict(input_is_parallel=True)
    options |= dict(bias=bias, dtype=F64, **(SP if sequence_parallel else {}))

    def rank() -> Any:
        torch.manual_seed(0)
        layer = layer_class(8, 12, **options)
        features = 8 if column else 4
        x = torch.randn(4, features, dtype=F64, requires_grad=True)
        out = layer(x)
        grad = torch.randn(out.shape, dtype=F64)
        params = [*layer.parameters()]
        with comm.record() as whole_calls, Flops() as whole_flops:
            whole = torch.autograd.grad(out, [x, *params], grad)

        out = layer(x)
        with comm.record() as first_calls, Flops() as first_flops:
            (grad_x,), weight_half = divide([get_gradient_edge(out)], [grad], [get_gradient_edge(x)])
        assert weight_half.once == [] and all(param.grad is None for param in params)
        with comm.record() as second_calls, Flops() as second_flops:
            weight_half.run()
        close(grad_x, whole[0])
        for param, expected in zip(params, whole[1:]):
            close(param.grad, expected)
        assert first_flops.total == second_flops.total == whole_flops.total / 2
        verbs = [[call.verb for call in calls] for calls in (whole_calls, first_calls, second_calls)]
        assert sorted(verbs[1] + verbs[2]) == sorted(verbs[0])
        return verbs[1:]

    if column:
        expected = [["reduce_scatter"], ["all_gather"]] if sequence_parallel else [["all_reduce"], []]
    else:
        expected = [["all_gather"], []] if sequence_parallel else [[], []]
    assert comm.threads.run(Mesh(2, tp=2), rank) == [expected] * 2

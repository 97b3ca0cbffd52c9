"""GPT-2's linear layer, sharded, beside transformers' own: output, and gradients of input, weight and bias."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from neuronx_dist import comm, hf, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.replace import LayerPlan, apply
from neuronx_dist.parallel_layers.transposed_linear import ParallelConv1D
from tests.hf.models import error, sum_partial_gradients

TOLERANCE = 1e-10


def compare(row: bool, sequence: bool = False, stride: int = 1) -> None:
    """A layer of 8 to 12 features on `[2, 4, 8]`; a column layer's output is joined, a row layer's input is cut."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 4, size, generator=generator, dtype=torch.float64) for size in (8, 12))
    torch.manual_seed(0)
    whole = Conv1D(12, 8).double()
    nn.init.normal_(whole.bias)
    inputs = x.clone().requires_grad_()
    expected = whole(inputs)
    expected.backward(g)

    def rank() -> None:
        model = nn.ModuleDict({"layer": Conv1D(12, 8).double()})
        model["layer"].load_state_dict(whole.state_dict())
        options = {"sequence_parallel_enabled": sequence} if row else {"stride": stride}
        apply(model, [LayerPlan("layer", f"transposed_{'row' if row else 'column'}", None, (), options)])
        assert type(model["layer"]) is ParallelConv1D
        local = x.clone().requires_grad_()
        out = model["layer"](spmd.convert(local, "tp", src=spmd.I, dst=spmd.S(-1)) if row else local)
        if sequence:
            out = spmd.all_gather(out, "tp", src=spmd.S(1), dst=spmd.I)
        elif not row:
            blocks = out.unflatten(-1, (stride, -1))
            out = spmd.all_gather(blocks, "tp", src=spmd.S(-1), dst=spmd.I).flatten(-2)
        out.backward(g)
        sum_partial_gradients(model)
        found = hf.full_state_dict(model, gradients=True)
        assert error(out.detach(), expected.detach()) < TOLERANCE
        assert error(local.grad, inputs.grad) < TOLERANCE
        assert error(found["layer.weight"], whole.weight.grad) < TOLERANCE
        assert error(found["layer.bias"], whole.bias.grad) < TOLERANCE

    comm.threads.run(Mesh(2, tp=2), rank)


@pytest.mark.parametrize(
    "row, sequence, stride", [(False, False, 1), (False, False, 3), (True, False, 1), (True, True, 1)]
)
def test_a_sharded_layer_computes_what_the_whole_one_does(row: bool, sequence: bool, stride: int) -> None:
    compare(row, sequence, stride)


def test_initial_values_are_those_of_any_degree() -> None:
    def initialised(module: nn.Module) -> None:
        if isinstance(module, Conv1D):
            nn.init.normal_(module.weight)
            nn.init.zeros_(module.bias)

    def rank() -> torch.Tensor:
        with torch.device("meta"):
            model = nn.ModuleDict({"layer": Conv1D(12, 8)})
        apply(model, [LayerPlan("layer", "transposed_column", None, (), {"stride": 3})])
        return hf.full_state_dict(hf.materialize(model, 3, init_fn=initialised))["layer.weight"]

    one, two = (comm.threads.run(Mesh(tp, tp=tp), rank)[0] for tp in (1, 2))
    assert torch.equal(one, two) and one.shape == (8, 12)

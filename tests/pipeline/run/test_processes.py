"""The corners of the pipeline on real processes over gloo."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.pipeline import NxDPPModel
from tests.pipeline.test_parity import Skip
from tests.support.pipeline_models import Block, batch, cut, error, make, reference
from tests.support.pool import WorkerFailure, processes


def step(model: Any, inputs: dict[str, Any], microbatches: int) -> Any:
    """Two steps, so that the second reuses every channel; the gradients of the second."""
    piece = cut(inputs, comm.size("dp"))[comm.rank("dp")]
    pipeline = NxDPPModel(
        model,
        transformer_layer_cls=Block,
        num_microbatches=microbatches,
        output_loss_value_spec=True,
        auto_partition=True,
        broadcast_and_average_loss=True,
    )
    pipeline.run_train(**piece)
    pipeline.zero_grad()
    loss = pipeline.run_train(**piece)
    assert isinstance(loss, torch.Tensor)
    assert error(pipeline.run_eval(**piece), loss) < 1e-12
    return loss, {name: param.grad for name, param in pipeline.local_named_parameters()}


@pytest.mark.parametrize(
    "pp,world,microbatches,kind",
    [
        (2, 2, 1, "skip"),
        (4, 4, 4, "tied"),
        (2, 4, 2, "tied"),
        pytest.param(2, 2, 1, "tied", marks=pytest.mark.full),
        pytest.param(4, 4, 4, "skip", marks=pytest.mark.full),
        pytest.param(2, 4, 2, "skip", marks=pytest.mark.full),
    ],
)
def test_parity(pp: int, world: int, microbatches: int, kind: str) -> None:
    model = make(tied=True) if kind == "tied" else make(Skip)
    results = processes(world).run(step, copy.deepcopy(model), batch(), microbatches, mesh={"pp": pp})
    loss, grads = reference(model, batch())
    for value, local in results:
        assert error(value, loss) < 1e-10
        for name, grad in local.items():
            assert error(grad, grads[name]) < 1e-10, name


def fail_on_the_last_stage(model: Any) -> None:
    if comm.rank("pp") == 1:
        model.layers[3].register_forward_hook(fail)
    NxDPPModel(model, Block, 4, output_loss_value_spec=True, auto_partition=True).run_train(**batch())


def fail(module: Any, args: Any, output: torch.Tensor) -> None:
    if type(output) is torch.Tensor:  # not while it is recorded
        raise ArithmeticError("no good")


def test_a_failing_stage_ends_all() -> None:
    with pytest.raises(WorkerFailure, match=r"F0 on stage 1 of 2: layers_3 \(.*\): no good") as caught:
        processes(2).run(fail_on_the_last_stage, make(), mesh={"pp": 2})
    assert (caught.value.rank, caught.value.kind) == (1, "ArithmeticError")

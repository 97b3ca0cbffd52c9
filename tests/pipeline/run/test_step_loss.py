"""Losses that a step returns on each rank; and the origin of a loss that is not finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.run.step_loss import refuse_infinite_loss, report_loss
from neuronx_dist.pipeline.schedule import Kind, Task
from neuronx_dist.program.recording import TensorSpec

CPU, F64 = torch.device("cpu"), torch.float64
MESH = Mesh(8, pp=2, cp=2)


def _reported(last_stage: int, report_on: str = "cpu", **options: bool) -> list[Any]:
    """Reports on losses `rank` and `rank + 4` on each rank of the last stage."""

    def rank() -> Any:
        losses = [torch.tensor(float(comm.rank("world") + more), dtype=F64) for more in (0, 4)]
        return report_loss(
            losses if comm.rank("pp") == last_stage else [],
            TensorSpec((), (), F64, True),
            stage=comm.rank("pp"),
            last_stage=last_stage,
            computed_on=CPU,
            report_on=torch.device(report_on),
            **{"return_mb_loss": False, "broadcast_and_average_loss": False, **options},
        )

    return comm.threads.run(MESH, rank)


@pytest.mark.parametrize("last_stage", [0, 1])
def test_losses_by_rank(last_stage: int) -> None:
    losses = [float(rank + 2) if rank // 4 == last_stage else None for rank in range(8)]
    assert _reported(last_stage) == losses
    pairs = [[rank, rank + 4] if rank // 4 == last_stage else None for rank in range(8)]
    assert _reported(last_stage, return_mb_loss=True) == pairs
    everywhere = _reported(last_stage, broadcast_and_average_loss=True)
    assert everywhere == [4 * last_stage + 1.5 + 2.0] * 8 and {loss.dtype for loss in everywhere} == {F64}


def test_losses_are_where_they_are_wanted() -> None:
    for options in ({}, {"return_mb_loss": True}, {"broadcast_and_average_loss": True}):
        reported = [loss for loss in _reported(1, "meta", **options) if loss is not None]
        flat = [loss for value in reported for loss in (value if isinstance(value, list) else [value])]
        assert flat and all(loss.is_meta for loss in flat)


FINITE, BROKEN = torch.ones(2, 3), torch.tensor([1.0, math.inf])


@pytest.mark.parametrize(
    "received, origin",
    [
        ([], "the fault is on this stage, which received nothing from others"),
        ([FINITE], "all tensors that this stage received were finite, so the fault is on this stage"),
        (
            [FINITE, torch.tensor([7])],
            "all tensors that this stage received were finite, so the fault is on this stage",
        ),
        ([FINITE, BROKEN, BROKEN.view(2, 1)], "this stage received a tensor of shape [2] that was not finite already"),
        ([BROKEN.nan_to_num(posinf=math.nan)], "this stage received a tensor of shape [2] that was not finite already"),
    ],
)
@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(loss: float, received: list[torch.Tensor], origin: str) -> None:
    task = Task(Kind.FORWARD, 1, 3)
    refuse_infinite_loss(task, [torch.tensor(3e38), BROKEN], received)
    with pytest.raises(FloatingPointError) as error:
        refuse_infinite_loss(task, [torch.tensor(loss, requires_grad=True)], received)
    assert str(error.value).startswith(f"the loss of microbatch 3 is {loss} (check_finite=True); {origin}")

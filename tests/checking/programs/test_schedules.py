"""Every schedule of a pipeline is played: a right one is ok, a wrong one is refused with the tasks of both stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.checking.programs.message_types import MessageTypes
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.schedule import Kind, OneFOneB, WrittenSchedule
from neuronx_dist.spmd.tensor_type import type_of
from tests.support.toy_schedules import Halves, ThereAndBack

pytestmark = pytest.mark.slow

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": dict(schedule="gpipe"),
    "interleaved": dict(virtual_pipeline_size=2),
    "zb_h1": dict(schedule="zb_h1"),
    "zb_v": dict(schedule="zb_v"),
    "V of a user": dict(schedule=ThereAndBack),
    "halves of a user": dict(schedule=Halves),
    "written": dict(schedule=WrittenSchedule("F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 F2 B1 B2 F3 B3")),
    "written, another placement": dict(
        schedule=WrittenSchedule(
            *["F0 F0.1 F1 F1.1 F2 F2.1 F3 F3.1 B0.1 B0 B1.1 B1 B2.1 B2 B3.1 B3"] * 2, holders=[1, 1, 0, 0]
        )
    ),
}


class Block(nn.Module):
    """A column- and a row-parallel layer; the defect: the sum over tp is left out, in the block of this number."""

    def __init__(self, index: int, defect: int | None) -> None:
        super().__init__()
        self.up = nxd.ColumnParallelLinear(8, 16, gather_output=False)
        self.down = nxd.RowParallelLinear(16, 8, bias=False, input_is_parallel=True)
        self.is_wrong = index == defect

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).relu()
        return x + (nn.functional.linear(y, self.down.weight) if self.is_wrong else self.down(y))


class Stack(nn.Module):
    def __init__(self, defect: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(index, defect) for index in range(8))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x - target).square().mean()


def build(defect: int | None = None, by_stage: Any = None, **options: Any) -> Any:
    if by_stage is not None:
        options["schedule"] = by_stage[0 if comm.rank("pp") == 0 else 1]
    return nxd.NxDPPModel(
        Stack(defect),
        transformer_layer_cls=Block,
        num_microbatches=4,
        output_loss_value_spec=True,
        input_names=["x", "target"],
        auto_partition=True,
        **options,
    )


def check(mesh: dict[str, int], **options: Any) -> Any:
    inputs = {"x": torch.zeros(8, 8), "target": torch.zeros(8, 8)}
    return spmd.check(build, inputs, mesh, options=options)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_that_runs_is_ok_and_its_messages_have_types(name, monkeypatch):
    received: list[torch.Tensor] = []
    typed_when_posted: list[bool] = []
    connect = MessageTypes.connect

    def listen(self, mode, model, *given):
        connect(self, mode, model, *given)
        arrived = mode.received

        def keep(buffer, axis, *peer):
            type_of_message = arrived(buffer, axis, *peer)
            if self.halt_after is None:
                received.append(buffer)
                if axis in model.stage_channels.of(Kind.RECV_BACKWARD):
                    typed_when_posted.append(type_of_message() is not None)
            return type_of_message

        mode.received = keep

    monkeypatch.setattr(MessageTypes, "connect", listen)
    report = check({"pp": 2, "tp": 2}, **SCHEDULES[name])
    assert report.ok, str(report)
    assert not report.assumed
    assert received and all(type_of(buffer) is not None for buffer in received)
    # Of the first of several chunks, gradients are expected after activations were sent, whose types they follow.
    assert any(typed_when_posted) is (name in ("interleaved", "zb_v", "V of a user"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interleaved", "zb_v"])
def test_many_chunks_and_stages_are_ok(name):
    report = check({"pp": 4, "dp": 2}, **SCHEDULES[name])
    assert report.ok and not report.assumed, str(report)


@pytest.mark.parametrize(("name", "defect"), [("interleaved", 5), ("zb_v", 1), ("zb_v", 6), ("zb_v", 3), ("gpipe", 5)])
def test_a_sum_that_is_left_out_is_found_in_any_chunk(name, defect):
    """Once, at the stage that has it: the types of what other stages get are those that were sent."""
    report = check({"pp": 2, "tp": 2}, defect=defect, **SCHEDULES[name])
    (problem,) = report.problems
    assert problem.kind == "types" and "P on tp" in problem.message, str(report)
    stage = {"interleaved": [0, 0, 1, 1, 0, 0, 1, 1], "zb_v": [0, 0, 1, 1, 1, 1, 0, 0], "gpipe": [0] * 4 + [1] * 4}
    assert {rank // 2 for rank in problem.ranks} == {stage[name][defect]}


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("1f1b", "gpipe", ["OneFOneB(", "GPipe(", "stage 1 does B0 in the first where it does F1 in the second"]),
        ("zb_v", "1f1b", ["ZeroBubbleV(", "OneFOneB(", "hold the pieces [0, 1, 1, 0] and [0, 1]"]),
        (
            "1f1b",
            "zb_h1",
            ["OneFOneB(", "ZeroBubbleH1(", "stage 1 does B0 in the first where it does I0 in the second"],
        ),
    ],
)
def test_ranks_of_a_pipeline_have_one_schedule(one, other, said):
    report = check({"pp": 2, "dp": 2}, by_stage=[one, other])
    (problem,) = report.problems
    assert problem.kind == "pipeline" and problem.ranks == (0, 2), str(report)
    for text in ["ranks 0 and 2 are stages 0 and 1 of one pipeline", *said]:
        assert text in problem.message, problem.message


def other_cuts() -> Any:
    return nxd.NxDPPModel(
        Stack(), Block, 4, pipeline_cuts=[f"layers.{comm.rank('pp') + 2}"], output_loss_value_spec=True
    )


def other_layers() -> Any:
    model = Stack()
    if comm.rank("pp") == 0:
        model.layers.append(Block(8, None))
    return nxd.NxDPPModel(model, Block, 4, pipeline_cuts=["layers.3"], output_loss_value_spec=True)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            other_cuts,
            "pipeline_cuts\n  rank 0 (stage 0): ['layers.2']\n  rank 2 (stage 1): ['layers.3']\n    Give NxDPPModel",
        ),
        (
            other_layers,
            "parameters and buffers: layers.8.up.weight\n  rank 0 (stage 0): [16, 8] float32\n  rank 2 (stage 1): none",
        ),
    ],
)
def test_ranks_of_a_pipeline_have_one_model_and_cut_it_alike(program, said):
    """In the words of the job itself, which would end with them."""
    inputs = {"x": torch.zeros(8, 8), "target": torch.zeros(8, 8)}
    (problem,) = spmd.check(program, inputs, {"pp": 2, "dp": 2}).problems
    assert problem.kind == "pipeline" and problem.ranks == (0, 2)
    assert f"the ranks of a pipeline disagree about {said}" in problem.message, problem.message


class Losing(OneFOneB):
    """Stage 1 forgets the last microbatch."""

    def computations(self, stage):
        tasks = super().computations(stage)
        return [task for task in tasks if stage == 0 or task.microbatch < self.num_microbatches - 1]


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "deadlock": (
        WrittenSchedule("F0 B0 F1 B1 F2 B2 F3 B3", "F0 F1 B0 B1 F2 F3 B2 B3"),
        ["deadlock: stage 0 at B0 (waits for SB0 of stage 1), stage 1 at F1 (waits for SF1 of stage 0)"],
    ),
    "a microbatch is lost": (Losing, ["stage 1 never does F3, and stage 0 does F3"]),
    "forwards are paired wrongly": (
        WrittenSchedule("F0 F1 F2 F3 B0 B1 B2 B3", "F1 F0 F2 F3 B0 B1 B2 B3"),
        ["stage 0 sends SF0 where stage 1 expects RF1"],
    ),
    "gradients are paired wrongly": (
        WrittenSchedule("F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B1 B0 B2 B3"),
        ["stage 1 sends SB1 where stage 0 expects RB0"],
    ),
    "a message is not sent": (
        WrittenSchedule(
            "F0 SF0 F1 SF1 F2 SF2 F3 RB0 B0 RB1 B1 RB2 B2 RB3 B3",
            "RF0 F0 RF1 F1 RF2 F2 RF3 F3 B0 SB0 B1 SB1 B2 SB2 B3 SB3",
        ),
        ["stage 0 at B0 (waits for SB0 of stage 1), stage 1 at F3 (waits for SF3 of stage 0)"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schedule_that_cannot_run_is_refused_before_launch(name):
    """By the check and by the model, with the tasks of both stages."""
    schedule, said = REFUSED[name]
    with comm.as_rank(Mesh(2, pp=2), 0), pytest.raises(RuntimeError) as refused:
        build(schedule=schedule)
    (problem,) = check({"pp": 2}, schedule=schedule).problems
    for text in said:
        assert text in str(refused.value) and text in problem.message, problem.message


def test_a_microbatch_that_is_left_out_of_what_is_written_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match="^stage 1 never does B3, and stage 0 does B3; "):
        WrittenSchedule("F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 F3 B0 B1 B2")

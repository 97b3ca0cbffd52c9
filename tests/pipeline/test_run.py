"""`model.run(schedule, inputs)` and `model.program(inputs)`: any schedule, also one that the package does not know."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import neuronx_dist.pipeline.model
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.gradients.reduce import reduce_gradients
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import (
    GPipe,
    Inference,
    Kind,
    NxDPPModel,
    OneFOneB,
    Schedule,
    Task,
    WrittenSchedule,
    ZeroBubbleV,
)
from neuronx_dist.pipeline.cut.splitting import StagePlan
from neuronx_dist.pipeline.run.lockstep_transport import Transfers
from tests.support.pipeline_models import Block, batch, error, make, on_ranks, reference
from tests.support.toy_schedules import Around, Halves, ThereAndBack

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

OPTIONS: dict[str, Any] = {"num_microbatches": 4, "output_loss_value_spec": True}


@pytest.fixture(params=["messages", "lockstep"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(threads.ThreadsBackend, "has_messages", request.param == "messages")
    name: str = request.param
    return name


def check(schedule_class: type[Schedule], pp: int, microbatches: int, trained_by: Any = None, **model: Any) -> None:
    """A schedule gives the losses and gradients of one process, and keeps what it says that it keeps."""
    original, inputs = make(**model), batch(rows=2 * microbatches)
    loss, grads = reference(original, inputs, microbatches)
    schedule = schedule_class(pp, microbatches)

    def use(pipeline: NxDPPModel) -> Any:
        losses = pipeline.run(schedule, inputs)
        assert pipeline.peak_in_flight == schedule.peak_in_flight(pipeline.stage)
        reduce_gradients(pipeline)  # of weights that stages share
        return losses, {name: param.grad for name, param in pipeline.local_named_parameters()}

    seen = set()
    for stage, (losses, found) in enumerate(on_ranks(Mesh(pp, pp=pp), original, use, **OPTIONS, schedule=trained_by)):
        assert len(losses) == microbatches
        if stage == schedule.holders[-1]:
            assert error(torch.stack(losses).mean(), loss) < 1e-12
        else:
            assert losses == [None] * microbatches
        seen |= found.keys()
        assert all(error(grad, grads[name]) < 1e-10 for name, grad in found.items())
    assert seen == grads.keys()


@pytest.mark.parametrize("pp,microbatches", [(1, 3), (2, 1), (2, 5), (4, 4)])
@pytest.mark.parametrize("schedule_class", [OneFOneB, GPipe, Halves])
def test_a_schedule_is_one_class(schedule_class: type[Schedule], pp: int, microbatches: int, transport: str) -> None:
    """The toy schedules are ten lines each, and know nothing of executors and transports."""
    check(schedule_class, pp, microbatches)


@pytest.mark.parametrize("schedule_class", [GPipe, Halves])
def test_tied_weights_and_frozen_ones(schedule_class: type[Schedule]) -> None:
    check(schedule_class, 3, 2, tied=True)


@pytest.mark.parametrize("schedule_class", [Around, ThereAndBack])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_several_chunks_on_a_stage(schedule_class: type[Schedule], microbatches: int) -> None:
    """The schedule decides how the model is cut and which stage has the loss."""
    check(schedule_class, 2, microbatches, trained_by=schedule_class)
    original = make(tied=True)
    loss, _ = reference(original, batch(), 4)
    options = {**OPTIONS, "broadcast_and_average_loss": True, "schedule": schedule_class}
    both = on_ranks(Mesh(2, pp=2), original, lambda p: (p.run_eval(**batch()), p.run_train(**batch())), **options)
    assert all(error(value, loss) < 1e-12 for values in both for value in values)


@pytest.mark.parametrize("schedule_class", [Around, ThereAndBack, ZeroBubbleV])
@pytest.mark.parametrize("stages", [2, 3])
def test_chunks_in_lockstep(schedule_class: type[Schedule], stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.ThreadsBackend, "has_messages", False)
    check(schedule_class, stages, 5, trained_by=schedule_class, layers=6)


def test_a_lane_is_what_one_collective_can_carry() -> None:
    def pairs(schedule: Schedule) -> list[list[tuple[int, int]]]:
        return [lane.pairs for lane in Transfers([StagePlan() for _ in range(6)], schedule).lanes]

    assert pairs(Around(3, 1)) == [[(0, 1), (1, 2), (2, 0)], [(0, 2), (1, 0), (2, 1)]]
    down, up = [(0, 1), (1, 2)], [(1, 0), (2, 1)]
    assert pairs(ThereAndBack(3, 1)) == [down, up, up, down]


def test_sends_under_way_are_within_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent tensors are freed when their window is over, and not at the end of the step."""
    under_way: dict[tuple[str, int], int] = {}
    most: dict[tuple[str, int], int] = {}
    send = comm.send

    def counted(x: torch.Tensor, channel: Any, **options: Any) -> Any:
        handle, key = send(x, channel, **options), (channel.axis, comm.rank("pp"))
        under_way[key] = under_way.get(key, 0) + 1
        most[key] = max(most.get(key, 0), under_way[key])
        wait = handle.wait

        def waiting() -> Any:
            under_way[key] -= 1
            return wait()

        return SimpleNamespace(wait=waiting)

    monkeypatch.setattr(comm, "send", counted)
    on_ranks(Mesh(3, pp=3), make(), lambda pipeline: pipeline.run(OneFOneB(3, 8), batch()), **OPTIONS)
    assert set(under_way.values()) == {0}
    schedule = OneFOneB(3, 8)
    assert most == {
        **{("pp_forward", stage): schedule.send_window(Kind.SEND_FORWARD, stage) for stage in (0, 1)},
        **{("pp_backward", stage): schedule.send_window(Kind.SEND_BACKWARD, stage) for stage in (1, 2)},
    }


class Dropped(Halves):
    """Leaves out the last weight gradient of each stage."""

    def computations(self, stage: int) -> list[Task]:
        return super().computations(stage)[:-1]


def test_a_dropped_weight_gradient_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuronx_dist.pipeline.model, "check_runs", lambda schedule: None)
    with pytest.raises(AssertionError):
        check(Dropped, 2, 2)


@pytest.mark.parametrize(
    "schedule,message",
    [
        (Dropped(2, 2), r"^Dropped\(.*\) cannot run: stage 0 never does W1"),
        (WrittenSchedule("F0 B0 F1 B1", "F0 F1 B0 B1"), "cannot run: deadlock: stage 0 at B0"),
        (WrittenSchedule("F0 F1 B1 B0", "F0 B0 F1 B1"), "cannot run: "),
        (WrittenSchedule("F0 SF0 F1 SF1 B0 B1", "RF0 F0 B0 F1 B1"), "cannot run: "),
    ],
)
def test_a_schedule_that_cannot_run_is_refused_before_any_stage_waits(schedule: Schedule, message: str) -> None:
    def use(pipeline: NxDPPModel) -> None:
        with pytest.raises(RuntimeError, match=message), comm.record() as calls:
            pipeline.run(schedule, batch())
        assert not calls

    on_ranks(Mesh(2, pp=2), make(), use, **OPTIONS)
    with pytest.raises(RuntimeError, match=message), comm.as_rank(Mesh(2, pp=2), 0):
        NxDPPModel(make(), Block, num_microbatches=2, auto_partition=True, schedule=schedule)


def test_a_schedule_is_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Schedule] = []
    monkeypatch.setattr(neuronx_dist.pipeline.model, "check_runs", played.append)

    def use(pipeline: NxDPPModel) -> None:
        schedule = GPipe(1, 4)
        for _ in range(3):
            pipeline.run_train(**batch())
            pipeline.run_eval(**batch())
            pipeline.run(schedule, batch())
        pipeline.num_microbatches = 2
        pipeline.run_train(**batch())

    on_ranks(Mesh(1), make(), use, **OPTIONS)
    assert [type(schedule) for schedule in played] == [OneFOneB, Inference, GPipe, OneFOneB]


def test_the_number_of_microbatches_is_that_of_the_schedule() -> None:
    """And forwards alone leave no gradients; without a loss they return the model's results."""
    model = make()

    def use(pipeline: NxDPPModel) -> Any:
        losses = pipeline.run(Inference(2, 2), batch())
        assert pipeline.peak_in_flight == 0 and all(param.grad is None for param in pipeline.parameters())
        return losses

    first, last = on_ranks(Mesh(2, pp=2), model, use, **OPTIONS)
    assert first == [None, None] and [loss.shape for loss in last] == [torch.Size([])] * 2

    _, last = on_ranks(Mesh(2, pp=2), model, use)
    assert [type(result) for result in last] == [torch.Tensor] * 2


def test_gradients_are_added_and_not_reduced() -> None:
    model = make()
    _, once = reference(model, batch(), 4)

    def use(pipeline: NxDPPModel) -> Any:
        with torch.no_grad(), comm.record() as calls:
            pipeline.run(OneFOneB(2, 4), batch())
            pipeline.run(GPipe(2, 4), batch())
        assert {call.verb.removeprefix("wait_") for call in calls} <= {"send", "recv", "wait"}
        return {name: param.grad for name, param in pipeline.local_named_parameters()}

    for grads in on_ranks(Mesh(2, pp=2), model, use, **OPTIONS):
        assert all(error(grad, 2 * once[name]) < 1e-10 for name, grad in grads.items())


def test_a_program_is_recorded_once() -> None:
    def use(pipeline: NxDPPModel) -> Any:
        program = pipeline.program(batch())
        assert pipeline.program(batch(seed=1)) is program and pipeline.program(batch(rows=4)) is not program
        (chunk,) = program.chunks
        shapes = [spec.shape for spec in (*chunk.plan.received_specs, *chunk.plan.sent_specs)]
        return shapes, program.input_leaves, program.loss.shape

    first, last = on_ranks(Mesh(2, pp=2), make(), use, **OPTIONS)
    assert first[0] == last[0] == [(2, 6, 8)] and first[1] != last[1] and first[2] == ()


def test_schedules_that_are_not_for_this_model() -> None:
    def use(pipeline: NxDPPModel) -> None:
        with pytest.raises(ValueError, match=r"OneFOneB\(num_stages=3.* does not fit this model, which has 2 stages"):
            pipeline.run(OneFOneB(3, 4), batch())
        with pytest.raises(ValueError, match=r"Around\(num_stages=2.* with 1 pieces"):
            pipeline.run(Around(2, 4), batch())
        with pytest.raises(ValueError, match="8 rows, which is not divisible into 3 microbatches"):
            pipeline.run(OneFOneB(2, 3), batch())

    on_ranks(Mesh(2, pp=2), make(), use, **OPTIONS)

    def without_loss(pipeline: NxDPPModel) -> None:
        with pytest.raises(RuntimeError, match="a schedule with backwards needs to know which output is the loss"):
            pipeline.run(OneFOneB(2, 4), batch())
        with pytest.raises(RuntimeError, match="run_train needs to know which output is the loss"):
            pipeline.run_train(**batch())

    on_ranks(Mesh(2, pp=2), make(), without_loss, num_microbatches=4)

    def not_partitioned() -> None:
        pipeline = NxDPPModel(make(), transformer_layer_cls=Block)
        with pytest.raises(RuntimeError, match="not partitioned"):
            pipeline.program(batch())
        with pytest.raises(RuntimeError, match="not partitioned"):
            pipeline.run(Inference(2, 1), batch())

    comm.threads.run(Mesh(2, pp=2), not_partitioned)


def test_errors_of_a_schedule_name_its_task() -> None:
    class Failing(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            if type(x) is torch.Tensor:
                raise IndexError("no such thing")
            return super().forward(x)

    model = make()
    model.layers[3] = Failing().double()
    schedule = WrittenSchedule("F1 F0 I0 B1 W0", "F1 F0 I0 B1 W0")
    with pytest.raises(IndexError, match=r"^F1 on stage 1 of 2: layers_3 "):
        on_ranks(Mesh(2, pp=2), model, lambda pipeline: pipeline.run(schedule, batch()), **OPTIONS)
    assert Task(Kind.BACKWARD_WEIGHT, 0, 0) in schedule.tasks(0)

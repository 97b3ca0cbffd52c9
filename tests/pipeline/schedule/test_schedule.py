"""Schedules are data: their order, their bounds and their freedom from deadlock, proved without running a model."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest

from neuronx_dist.pipeline.schedule import (
    GPipe,
    Inference,
    Interleaved,
    Kind,
    OneFOneB,
    Schedule,
    Task,
    ZeroBubbleH1,
    ZeroBubbleV,
    format_schedule,
    rounds,
    simulate,
    training_schedule,
)
from neuronx_dist.pipeline.schedule.tasks import COMPUTATIONS, RECEIVES, SENDS
from tests.support.toy_schedules import Around, Halves, InTheseOrders, ThereAndBack

GRID = [(stages, microbatches) for stages in range(1, 9) for microbatches in (1, 2, 3, 4, 7, 8, 16, 33)]


class TwoChunks(Interleaved):
    def __init__(self, num_stages: int, num_microbatches: int) -> None:
        super().__init__(num_stages, num_microbatches, num_chunks=2)


SCHEDULES = [OneFOneB, Inference, GPipe, TwoChunks, ZeroBubbleH1, ZeroBubbleV, Halves, Around, ThereAndBack]


# --- what every schedule answers holds --------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("schedule_class", SCHEDULES)
def test_it_runs_without_deadlock_and_within_its_memory(schedule_class: type[Schedule], stages: int) -> None:
    for microbatches in (*range(1, 17), 33):
        schedule = schedule_class(stages, microbatches)
        assert simulate(schedule).peak_in_flight == [schedule.peak_in_flight(stage) for stage in range(stages)]


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("schedule_class", [OneFOneB, Inference, GPipe, Halves, Around])
def test_the_bubble_is_that_of_its_rounds(schedule_class: type[Schedule], stages: int) -> None:
    for microbatches in range(1, 17):
        schedule = schedule_class(stages, microbatches)
        found = rounds(schedule)
        idle = sum(task is None for each in found for task in each.tasks)
        assert schedule.bubble == pytest.approx(idle / (stages * len(found))), (stages, microbatches)


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("schedule_class", SCHEDULES)
def test_messages_have_two_ends(schedule_class: type[Schedule], stages: int) -> None:
    """Each send has one receive, of which it is the peer in turn; none is left over, and none is sent twice."""
    for microbatches in (1, 2, 5, 16):
        schedule = schedule_class(stages, microbatches)
        sends, receives = Counter(), Counter()
        for stage in range(stages):
            for task in schedule.tasks(stage):
                if task.kind in SENDS | RECEIVES:
                    other_end = schedule.peer(stage, task)
                    assert other_end is not None and other_end[0] != stage
                    assert schedule.peer(*other_end) == (stage, task)
                    ahead = task.kind in (Kind.SEND_FORWARD, Kind.RECV_BACKWARD)
                    here, there = (schedule.virtual_stage(s, t.chunk) for s, t in ((stage, task), other_end))
                    assert there - here == (1 if ahead else -1)
                    assert (task.kind in SENDS) == (other_end[1].kind in RECEIVES)
                    if task.kind in SENDS:
                        sends[other_end] += 1
                    else:
                        receives[stage, task] += 1
        assert sends == receives and set(sends.values()) <= {1}
        ways = 1 if schedule_class is Inference else 2
        boundaries = schedule.num_virtual_stages - 1 - (schedule_class in (ThereAndBack, ZeroBubbleV))
        assert len(sends) == (ways * boundaries * microbatches if stages > 1 else 0)


@pytest.mark.parametrize("schedule_class", SCHEDULES)
def test_virtual_stages_and_their_holders(schedule_class: type[Schedule]) -> None:
    for stages in range(1, 9):
        schedule = schedule_class(stages, 2)
        holders = [schedule.holder(position) for position in range(schedule.num_virtual_stages)]
        assert sorted(holders) == [(stage, chunk) for stage in range(stages) for chunk in range(schedule.num_chunks)]
        assert [schedule.virtual_stage(*each) for each in holders] == list(range(schedule.num_virtual_stages))


@pytest.mark.parametrize("schedule_class", SCHEDULES)
def test_receives_are_posted_before_the_computation_that_precedes_their_use(schedule_class: type[Schedule]) -> None:
    uses = {Kind.RECV_FORWARD: (Kind.FORWARD,), Kind.RECV_BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
    few = [(1, 1), (2, 3), (4, 2), (4, 4), (8, 16)]
    for stages, microbatches in GRID if schedule_class in (OneFOneB, Inference) else few:
        for stage in range(stages):
            tasks = schedule_class(stages, microbatches).tasks(stage)
            computations = [task for task in tasks if task.kind in COMPUTATIONS]
            for task in tasks:
                if task.kind in RECEIVES:
                    use = next(i for i, c in enumerate(computations) if c[1:] == task[1:] and c.kind in uses[task.kind])
                    if use > 0:
                        assert tasks.index(task) < tasks.index(computations[use - 1])


# --- 1F1B and inference -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_1f1b_keeps_as_few_microbatches_as_there_are_stages(stages: int, microbatches: int) -> None:
    expected = [min(stages - stage, microbatches) for stage in range(stages)]
    assert simulate(OneFOneB(stages, microbatches)).peak_in_flight == expected


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_each_task_once_and_in_order(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        tasks = OneFOneB(stages, microbatches).tasks(stage)
        assert len(set(tasks)) == len(tasks)
        expected = {Kind.FORWARD, Kind.BACKWARD}
        if stage > 0:
            expected |= {Kind.RECV_FORWARD, Kind.SEND_BACKWARD}
        if stage < stages - 1:
            expected |= {Kind.SEND_FORWARD, Kind.RECV_BACKWARD}
        for kind in Kind:
            found = [task.microbatch for task in tasks if task.kind is kind]
            assert found == (list(range(microbatches)) if kind in expected else [])


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_windows_of_1f1b(stages: int, microbatches: int) -> None:
    """The smallest window in which no send of activations waits: the gradient of the one it waits for has come back."""
    schedule = OneFOneB(stages, microbatches)
    for stage in range(stages):
        assert schedule.send_window(Kind.SEND_BACKWARD, stage) == 2
        window = schedule.send_window(Kind.SEND_FORWARD, stage)
        tasks = schedule.tasks(stage)
        waits_in = {
            size: any(
                tasks.index(Task(Kind.SEND_FORWARD, 0, m)) < tasks.index(Task(Kind.BACKWARD, 0, m - size))
                for m in range(size, microbatches if stage < stages - 1 else 0)
            )
            for size in (window - 1, window)
        }
        assert not waits_in[window]
        assert waits_in[window - 1] == (0 < window - 1 < microbatches and stage < stages - 1)


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_windows_of_inference_are_those_of_training(stages: int, microbatches: int) -> None:
    few = OneFOneB(stages, microbatches, max_forward_sends=2)
    for stage in range(stages):
        alone, trained = Inference(stages, microbatches), Inference(stages, microbatches, few)
        assert alone.send_window(Kind.SEND_FORWARD, stage) == stages - stage
        assert trained.send_window(Kind.SEND_FORWARD, stage) == min(2, stages - stage)
    assert len(rounds(alone)) == microbatches + stages - 1
    simulate(trained)


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_few_sends_change_nothing_but_the_window(stages: int, microbatches: int) -> None:
    schedule, usual = training_schedule(stages, microbatches, deallocate=True), training_schedule(stages, microbatches)
    for stage in range(stages):
        assert schedule.tasks(stage) == usual.tasks(stage)
        assert schedule.send_window(Kind.SEND_FORWARD, stage) == min(2, stages - stage)
        assert schedule.send_window(Kind.SEND_BACKWARD, stage) == 2
    assert simulate(schedule).peak_in_flight == simulate(usual).peak_in_flight
    with pytest.raises(ValueError, match="max_forward_sends must be at least 1, got 0"):
        OneFOneB(stages, microbatches, max_forward_sends=0)


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_the_microbatches_that_a_memory_prediction_plays(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        expected = min(microbatches, stages - stage + (3 if stage else 1))
        assert OneFOneB(stages, microbatches).microbatches_until_repeat(stage) == expected


def test_training_runs_1f1b() -> None:
    assert isinstance(training_schedule(4, 8), OneFOneB)
    assert OneFOneB(4, 8).trains and not Inference(4, 8).trains


def test_prints_compactly() -> None:
    assert format_schedule(OneFOneB(2, 2).tasks(0)) == "F0 SF0 RB0 F1 SF1 RB1 B0 B1"
    assert format_schedule(OneFOneB(2, 2).tasks(1)) == "RF0 F0 RF1 B0 SB0 F1 B1 SB1"
    assert format_schedule(OneFOneB(1, 2).tasks(0)) == "F0 B0 F1 B1"
    assert format_schedule(Inference(3, 2).tasks(1)) == "RF0 RF1 F0 SF0 F1 SF1"
    assert format_schedule(Halves(2, 1).tasks(1)) == "RF0 F0 I0 SB0 W0"
    assert format_schedule(Around(2, 1).tasks(0)) == "RF0.1 F0 SF0 RB0.1 F0.1 SF0.1 RB0 B0.1 SB0.1 B0"
    assert repr(Around(2, 1)) == "Around(num_stages=2, num_microbatches=1, num_chunks=2)"


@pytest.mark.parametrize("arguments,message", [((2, 2, 1), "no stage 2 in a pipeline of 2"), ((0, 2, 0), "got 0")])
def test_impossible_arguments(arguments: tuple[int, int, int], message: str) -> None:
    stage, stages, microbatches = arguments
    with pytest.raises(ValueError, match=message):
        OneFOneB(stages, microbatches).tasks(stage)


def test_a_computation_has_no_other_end() -> None:
    with pytest.raises(ValueError, match="F0 is a computation"):
        OneFOneB(2, 1).peer(0, Task(Kind.FORWARD, 0, 0))


# --- what the simulator sees ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stages,message",
    [
        (("F0 SF0 B0 RB0", "RF0 F0 B0 SB0"), "deadlock: stage 0 at B0"),
        (("F1 SF1 F0 SF0", "RF0 F0 RF1 F1"), "stage 0 sends SF1 where stage 1 expects microbatch 0"),
        (("F0 SF0 F1 SF1", "RF0 F0"), "stage 0 sends SF1, which stage 1 does not receive"),
        (("F0 SF0", "RF0 F0 RF1"), "stage 1 expects RF1, which stage 0 does not send"),
        (("F0 SF0", "RF0 F0 SF0"), "stage 1 does SF0, but no stage is there at the other end"),
        (("F0 I0 W0 F1 I1", "F0 B0 F1 B1"), "stage 0 never does W1"),
        (("F0 B0 F1", "F0 B0 F1 B1"), "stage 0 never does B1"),
        (("F0 W0 I0", "F0 B0"), "stage 0 does W0 before what it starts from"),
        (("F0 B0 W0", "F0 B0"), "stage 0 does W0 before what it starts from, or twice"),
        (("B0 F0", "F0 B0"), "stage 0 does B0 before"),
    ],
)
def test_the_simulator_sees(stages: tuple[str, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        simulate(InTheseOrders(*stages))


@pytest.mark.parametrize(
    "window,message", [(0, "deadlock: stage 0 at SF0"), (1, "stage 0 at SF3, stage 1 at SB1"), (2, "")]
)
def test_the_simulator_sees_a_window_that_is_too_small(window: int, message: str) -> None:
    class Windowed(InTheseOrders):
        def send_window(self, kind: Kind, stage: int) -> int:
            return window

    schedule = Windowed(
        "F0 F1 F2 F3 SF0 SF1 SF2 SF3 RB0 RB1 RB2 RB3 B0 B1 B2 B3",
        "RF0 F0 B0 SB0 RF1 F1 B1 SB1 RF2 F2 B2 SB2 RF3 F3 B3 SB3",
    )
    with pytest.raises(RuntimeError, match=message) if message else nullcontext():
        simulate(schedule)


def test_the_simulator_sees_a_swapped_peer() -> None:
    class Swapped(OneFOneB):
        def peer(self, stage: int, task: Task) -> tuple[int, Task] | None:
            other_end = super().peer(stage, task)
            if other_end is None or task.kind is not Kind.SEND_FORWARD:
                return other_end
            return other_end[0], other_end[1]._replace(microbatch=task.microbatch ^ 1)

    with pytest.raises(RuntimeError, match="stage 0 sends SF0 where stage 1 expects microbatch 0"):
        simulate(Swapped(2, 4))

"""Schedules are data: their order, their bounds and their freedom from deadlock, proved without running a model."""

from __future__ import annotations

import pytest

from neuronx_dist.pipeline.schedule import Kind, Task, format_schedule, inference, one_f_one_b, simulate

GRID = [(stages, microbatches) for stages in range(1, 9) for microbatches in (1, 2, 3, 4, 7, 8, 16, 33)]


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_1f1b_runs_without_deadlock_and_within_its_memory(stages: int, microbatches: int) -> None:
    found = simulate([one_f_one_b(stage, stages, microbatches) for stage in range(stages)])
    assert found.peak_in_flight == [min(stages - stage, microbatches) for stage in range(stages)]


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_inference_runs_without_deadlock(stages: int, microbatches: int) -> None:
    simulate([inference(stage, stages, microbatches) for stage in range(stages)])


@pytest.mark.parametrize("stages,microbatches", GRID)
def test_each_task_once_and_in_order(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        tasks = one_f_one_b(stage, stages, microbatches)
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
def test_receives_are_posted_before_the_computation_that_precedes_their_use(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        for tasks in (one_f_one_b(stage, stages, microbatches), inference(stage, stages, microbatches)):
            computations = [task for task in tasks if task.kind in (Kind.FORWARD, Kind.BACKWARD)]
            for task in tasks:
                if task.kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
                    kind = Kind.FORWARD if task.kind is Kind.RECV_FORWARD else Kind.BACKWARD
                    use = computations.index(Task(kind, task.microbatch))
                    if use > 0:
                        assert tasks.index(task) < tasks.index(computations[use - 1])


def test_prints_compactly() -> None:
    assert format_schedule(one_f_one_b(0, 2, 2)) == "F0 SF0 RB0 F1 SF1 RB1 B0 B1"
    assert format_schedule(one_f_one_b(1, 2, 2)) == "RF0 F0 RF1 B0 SB0 F1 B1 SB1"
    assert format_schedule(one_f_one_b(0, 1, 2)) == "F0 B0 F1 B1"
    assert format_schedule(inference(1, 3, 2)) == "RF0 RF1 F0 SF0 F1 SF1"


def test_the_simulator_sees_deadlocks() -> None:
    late = [Task(Kind.FORWARD, 0), Task(Kind.SEND_FORWARD, 0), Task(Kind.BACKWARD, 0), Task(Kind.RECV_BACKWARD, 0)]
    with pytest.raises(RuntimeError, match="deadlock: stage 0 at B0"):
        simulate([late, one_f_one_b(1, 2, 1)])


def test_the_simulator_sees_messages_out_of_order() -> None:
    first = [task for m in (1, 0) for task in (Task(Kind.FORWARD, m), Task(Kind.SEND_FORWARD, m))]
    with pytest.raises(RuntimeError, match="stage 0 sends SF1 where stage 1 expects microbatch 0"):
        simulate([first, inference(1, 2, 2)])


@pytest.mark.parametrize("arguments,message", [((2, 2, 1), "no stage 2 in a pipeline of 2"), ((0, 2, 0), "got 0")])
def test_impossible_arguments(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        one_f_one_b(*arguments)

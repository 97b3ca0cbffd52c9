"""1F1B and GPipe: their orders, and how many sends are under way."""

from __future__ import annotations

import pytest

from neuronx_dist.pipeline.schedule import GPipe, Inference, Kind, OneFOneB, Task, format_schedule, simulate

GRID = [(stages, microbatches) for stages in range(1, 9) for microbatches in (1, 2, 3, 4, 7, 8, 16, 33)]

# As Megatron-LM's `forward_backward_pipelining_without_interleaving` does it: (stages, microbatches) -> by stage.
MEGATRON = {
    (2, 3): ("F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"),
    (3, 5): (
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 B4",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4",
    ),
    (4, 2): ("F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"),
}


@pytest.mark.parametrize("sizes", MEGATRON)
def test_the_order_is_megatrons(sizes: tuple[int, int]) -> None:
    assert tuple(format_schedule(OneFOneB(*sizes).computations(stage)) for stage in range(sizes[0])) == MEGATRON[sizes]


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
def test_the_microbatches_that_a_memory_prediction_plays(stages: int, microbatches: int) -> None:
    for stage in range(stages):
        expected = min(microbatches, stages - stage + (3 if stage else 1))
        assert OneFOneB(stages, microbatches).microbatches_until_repeat(stage) == expected


def test_gpipe() -> None:
    assert format_schedule(GPipe(3, 3).computations(1)) == "F0 F1 F2 B2 B1 B0"
    assert [GPipe(3, 5).peak_in_flight(stage) for stage in range(3)] == [5, 5, 5]
    assert GPipe(3, 5).microbatches_until_repeat(1) == 5


def test_windows_of_inference_are_those_of_training() -> None:
    for deallocate in (False, True):
        training = OneFOneB(4, 8, deallocate=deallocate)
        inference = Inference(4, 8, training)
        for stage in range(4):
            expected = training.send_window(Kind.SEND_FORWARD, stage)
            assert inference.send_window(Kind.SEND_FORWARD, stage) == expected
            assert expected == (2 if deallocate else max(2, 4 - stage))
    assert Inference(4, 8).send_window(Kind.SEND_FORWARD, 0) == 4

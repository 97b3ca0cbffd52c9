"""Time and memory of a step: exact where there is a formula."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from neuronx_dist.pipeline.schedule import (
    Costs,
    GPipe,
    Inference,
    Interleaved,
    Kind,
    OneFOneB,
    TimedTask,
    WrittenSchedule,
    ZeroBubbleV,
    simulate,
)
from neuronx_dist.pipeline.schedule.tasks import parse_schedule

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

SIZES = list(product(range(1, 9), (1, 2, 5, 8, 16)))
COSTS = Costs(2.0, 3.0, 1.5)
WHOLE = 2.0 + 3.0 + 1.5  # of a microbatch in a chunk


@pytest.mark.parametrize("schedule_class", [OneFOneB, GPipe])
def test_time_of_1f1b_and_gpipe(schedule_class: type[OneFOneB | GPipe]) -> None:
    for stages, microbatches in SIZES:
        simulation = simulate(schedule_class(stages, microbatches), COSTS)
        assert simulation.step_time == (microbatches + stages - 1) * WHOLE
        assert simulation.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_time_of_interleaved(chunks: int) -> None:
    """m (F + B) + (p - 1)(F + B) / v, where F and B are of a stage: for any m from p on, multiple of p or not."""
    for stages, microbatches in product((1, 2, 3, 5, 8), (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17)):
        schedule = Interleaved(stages, microbatches, chunks)
        missing = max(0, stages - microbatches)  # then a stage waits for the first to come around
        expected = (chunks * microbatches + stages - 1 + (chunks - 1) * missing) * WHOLE
        assert simulate(schedule, COSTS).step_time == expected, (stages, microbatches)


def test_a_timeline() -> None:
    simulation = simulate(OneFOneB(2, 2), Costs(1, 2, 1, message=0.5))
    tasks = [parse_schedule(text) for text in ("F0 F1 B0 B1", "F0 B0 F1 B1")]
    times = [[(0, 1), (1, 2), (6, 9), (10, 13)], [(1.5, 2.5), (2.5, 5.5), (5.5, 6.5), (6.5, 9.5)]]
    expected = [[TimedTask(task, *when) for task, when in zip(*stage)] for stage in zip(tasks, times)]
    assert simulation.timeline == expected
    assert simulation.step_time == 13
    assert simulation.bubble == 1 - 16 / 26


def test_messages_take_time_between_stages_and_none_within() -> None:
    """Twice there and back for one microbatch in a line of 3; ZB-V's last stage hands over to itself."""
    assert simulate(OneFOneB(3, 1), Costs(message=10)).step_time == 9 + 4 * 10
    assert simulate(ZeroBubbleV(3, 1), Costs(message=10)).step_time == simulate(ZeroBubbleV(3, 1)).step_time + 8 * 10
    assert simulate(ZeroBubbleV(1, 4), Costs(message=10)).step_time == 24


@pytest.mark.parametrize("message", [0.25, 2.0, 100.0])
def test_messages_of_gpipe_take_time_on_the_way_there_and_back(message: float) -> None:
    """(m + p - 1)(F + B) + 2 (p - 1) c: a stage waits once for a forward, and once for a backward."""
    for stages, microbatches in SIZES:
        expected = (microbatches + stages - 1) * WHOLE + 2 * (stages - 1) * message
        assert simulate(GPipe(stages, microbatches), replace(COSTS, message=message)).step_time == expected


@pytest.mark.parametrize("message", [0.0, 0.25, 2.0, 100.0])
def test_messages_of_1f1b(message: float) -> None:
    """Every end of a task, against max(end of the task before, end of what sends + c) + duration, written out here."""
    for stages, microbatches in SIZES:
        simulation = simulate(OneFOneB(stages, microbatches), replace(COSTS, message=message))
        ends = ends_of_1f1b(stages, microbatches, message)
        for stage, timed in enumerate(simulation.timeline):
            found = {(stage, task.kind is Kind.FORWARD, task.microbatch): end for task, _, end in timed}
            assert found == {key: end for key, end in ends.items() if key[0] == stage}
        assert simulation.step_time == max(ends.values())


def ends_of_1f1b(stages: int, microbatches: int, message: float) -> dict[tuple[int, bool, int], float]:
    """By stage, whether it is a forward, and microbatch."""
    orders = []
    for stage in range(stages):
        warmup = min(stages - 1 - stage, microbatches)
        order = [(True, number) for number in range(warmup)]
        for number in range(microbatches - warmup):
            order += [(True, warmup + number), (False, number)]
        orders.append(order + [(False, number) for number in range(microbatches - warmup, microbatches)])
    ends: dict[tuple[int, bool, int], float] = {}
    free, waiting = [0.0] * stages, [iter(order) for order in orders]
    following = [next(order, None) for order in waiting]
    while any(following):
        for stage, task in enumerate(following):
            if task is None:
                continue
            forward, number = task
            source = stage - 1 if forward else stage + 1
            at_end = not 0 <= source < stages
            if not at_end and (source, forward, number) not in ends:
                continue
            arrival = 0.0 if at_end else ends[source, forward, number] + message
            free[stage] = max(free[stage], arrival) + (2.0 if forward else 4.5)
            ends[stage, forward, number] = free[stage]
            following[stage] = next(waiting[stage], None)
    return ends


def test_a_message_is_hidden_by_other_work() -> None:
    """Stage 0 has enough to do until gradients are back; what is sent costs it nothing."""
    schedule = WrittenSchedule("F0 F1 F2 B0 B1 B2", "F0 B0 F1 B1 F2 B2")
    free, sent = (simulate(schedule, Costs(message=message)) for message in (0, 0.5))
    assert (
        [entry.start for entry in sent.timeline[0][:3]] == [entry.start for entry in free.timeline[0][:3]] == [0, 1, 2]
    )
    assert (free.timeline[0][3].start, sent.timeline[0][3].start) == (4, 5)
    assert free.timeline[1][1].start + 0.5 == sent.timeline[1][1].start


def test_costs_by_stage_chunk_and_pair_of_stages() -> None:
    def forward(stage: int, chunk: int) -> float:
        return {(0, 0): 1, (1, 0): 2, (0, 1): 4, (1, 1): 8}[stage, chunk]

    def message(source: int, target: int) -> float:
        return {(0, 1): 100, (1, 0): 1000}[source, target]

    inference = Inference(2, 1, Interleaved(2, 1, 2))
    simulation = simulate(inference, Costs(forward, message=message))
    assert simulation.step_time == 1 + 100 + 2 + 1000 + 4 + 100 + 8
    whole = simulate(WrittenSchedule("F0 B0"), Costs(1, lambda stage, chunk: 7, lambda stage, chunk: 5))
    halves = simulate(WrittenSchedule("F0 I0 W0"), Costs(1, lambda stage, chunk: 7, lambda stage, chunk: 5))
    assert whole.step_time == halves.step_time == 13


def test_memory_in_time() -> None:
    """A forward keeps from its start; halves of a backward free at their end."""
    schedule = WrittenSchedule("F0 F1 I0 I1 W0 W1")
    assert simulate(schedule, Costs(activation=5, weight_activation=2)).memory == [
        [(0, 0), (0, 5), (1, 10), (3, 7), (4, 4), (5, 2), (6, 0)]
    ]
    assert simulate(schedule, Costs(activation=5, weight_activation=2)).peak_memory == [10]
    assert simulate(schedule).memory == [[(0, 0), (0, 1), (1, 2), (5, 1), (6, 0)]]
    assert simulate(WrittenSchedule("F0 B0 F1 B1"), Costs(activation=5)).peak_memory == [5]
    by_chunk = Costs(activation=lambda stage, chunk: 10 * stage + chunk)
    assert simulate(WrittenSchedule("F0 F0.1 B0.1 B0", "F0 F0.1 B0.1 B0"), by_chunk).peak_memory == [1, 21]


@pytest.mark.parametrize("stages,microbatches", [(1, 3), (2, 5), (4, 8)])
def test_counted_memory_is_the_peak_in_flight(stages: int, microbatches: int) -> None:
    sizes = stages, microbatches
    for schedule in (OneFOneB(*sizes), Interleaved(*sizes, num_chunks=3), ZeroBubbleV(*sizes)):
        simulation = simulate(schedule)
        assert simulation.peak_memory == simulation.peak_in_flight
        assert all(changes[-1].amount == 0 for changes in simulation.memory)


def test_nothing_costs_anything() -> None:
    simulation = simulate(OneFOneB(2, 2), Costs(0, 0, 0))
    assert (simulation.step_time, simulation.bubble) == (0, 0)


def test_what_cannot_run_has_no_times() -> None:
    with pytest.raises(RuntimeError, match="deadlock: stage 0 at B0 .waits for SB0 of.* stage 1 at F1 .waits for SF1"):
        simulate(WrittenSchedule("F0 B0 F1 B1", "F0 F1 B0 B1"))


def test_the_bubble_of_what_cannot_run() -> None:
    with pytest.raises(RuntimeError, match="these wait for tasks that never come: stage 0 at B0, stage 1 at F1"):
        WrittenSchedule("F0 B0 F1 B1", "F0 F1 B0 B1").bubble  # noqa: B018

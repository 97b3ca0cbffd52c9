"""All that schedules of some sizes answer, as a file: a change of an order, a number or a message is a line of it.

`schedules.txt` and `faults.txt` have what was reviewed; NXD_UPDATE_SCHEDULES=1 writes them anew. That schedules are
right, the other files of this folder show.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from neuronx_dist.pipeline.schedule import (
    Costs,
    Inference,
    Kind,
    Schedule,
    Task,
    WrittenSchedule,
    prove,
    simulate,
    training_schedule,
)
from neuronx_dist.pipeline.schedule.analysis import fault_of, most_held
from neuronx_dist.pipeline.schedule.derived import OneMicrobatch
from neuronx_dist.pipeline.schedule.lockstep import rounds
from neuronx_dist.pipeline.schedule.tasks import counted, format_schedule

FOLDER = Path(__file__).parent
SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


def _schedules() -> Iterator[tuple[str, Schedule]]:
    for name, chunks, sizes in (
        ("1f1b", 1, [(1, 2), (3, 2), (3, 5)]),
        ("gpipe", 1, [(2, 3)]),
        ("interleaved", 2, [(2, 3), (3, 7)]),
        ("interleaved", 3, [(2, 2), (3, 2)]),
        ("zb_h1", 1, [(2, 3), (3, 2)]),
        ("zb_v", 1, [(1, 2), (3, 2), (3, 6)]),
    ):
        for size in sizes:
            yield name, training_schedule(*size, schedule=name, num_chunks=chunks)
    yield "1f1b, deallocating", training_schedule(3, 5, deallocate=True)
    yield "interleaved, deallocating", training_schedule(2, 7, num_chunks=2, deallocate=True)
    yield "zb_v, deallocating", training_schedule(4, 5, schedule="zb_v", deallocate=True)
    yield "inference", Inference(2, 3)
    yield "inference of zb_v", Inference(2, 3, training_schedule(2, 3, schedule="zb_v"))
    yield "one microbatch of zb_v", OneMicrobatch(training_schedule(2, 3, schedule="zb_v"))
    yield "written", WrittenSchedule("F0 F0.1 B0.1 I0 W0", "F0 F0.1 I0.1 I0 W0.1 W0", holders=[0, 1, 1, 0])
    yield "written with messages", WrittenSchedule("F0 SF0 F1 SF1 RB0 B0 RB1 B1", "F0 B0 F1 B1")


def _window(schedule: Schedule, stage: int, kind: Kind) -> int:
    return schedule.send_window(kind, stage)


def _lines(name: str, schedule: Schedule) -> Iterator[str]:
    yield f"== {name}: {schedule}"
    prove(schedule)
    costs = Costs(1, 2, 0.5, lambda source, target: 0.25 * (source + 2 * target), lambda stage, chunk: 1 + chunk, 0.5)
    simulation = simulate(schedule, costs)
    yield f"bubble {schedule.bubble:.4f}, step {simulation.step_time}, waiting {simulation.bubble:.4f}"
    yield f"holders {schedule.holders}, both ways {schedule.both_ways}, trains {schedule.trains}"
    for stage in range(schedule.num_stages):
        windows = [schedule.send_window(kind, stage) for kind in SENDS]
        few = [schedule.few_sends(kind, stage) for kind in SENDS]
        repeat, peak = schedule.microbatches_until_repeat(stage), schedule.peak_in_flight(stage)
        yield f"stage {stage}: windows {windows}, few {few}, repeats after {repeat}, in flight {peak} " + (
            f"({simulation.peak_in_flight[stage]}, {simulation.peak_memory[stage]})"
        )
        yield f"  {format_schedule(schedule.tasks(stage))}"
        yield f"  {[f'{task} {start:g}' for task, start, _ in simulation.timeline[stage]]}".replace("'", "")
        yield f"  {[f'{time:g} {amount:g}' for time, amount in simulation.memory[stage]]}".replace("'", "")
        window = partial(_window, schedule, stage)
        held = most_held(schedule.tasks(stage), schedule.num_chunks, window)
        for (kind, chunk), amounts in sorted(held.items(), key=lambda pair: (pair[0][0].value, pair[0][1])):
            yield f"  holds at {kind.value}{chunk}: {sorted(amounts)}"
    yield "in lockstep: " + " | ".join(str(one_round) for one_round in rounds(schedule))


def _compare(file: str, now: list[str]) -> None:
    if os.environ.get("NXD_UPDATE_SCHEDULES"):
        (FOLDER / file).write_text("\n".join(now) + "\n")
    assert now == (FOLDER / file).read_text().splitlines()


def test_schedules_are_as_reviewed() -> None:
    _compare("schedules.txt", [line for name, schedule in _schedules() for line in _lines(name, schedule)])


# --- faults


class _Changed(Schedule):
    """Two stages with tasks that are given, messages included, as nobody checks them."""

    def __init__(self, original: Schedule, orders: list[list[Task]]) -> None:
        super().__init__(original.num_stages, original.num_microbatches)
        self.num_chunks = original.num_chunks
        self._original, self._orders = original, orders

    def computations(self, stage: int) -> list[Task]:
        return [task for task in self._orders[stage] if task.kind.value in "FBIW"]

    def tasks(self, stage: int) -> list[Task]:
        return self._orders[stage]

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return self._original.virtual_stage(stage, chunk)

    def holder(self, virtual_stage: int) -> tuple[int, int]:
        return self._original.holder(virtual_stage)

    def send_window(self, kind: Kind, stage: int) -> int:
        return 1


def _said(ask: Callable[[], Any]) -> str:
    try:
        ask()
    except RuntimeError as error:
        return str(error)
    return "runs"


def _faults() -> Iterator[str]:
    """Each task of each stage left out, doubled, or exchanged with the next."""
    for name, chunks in (("1f1b", 1), ("zb_v", 1)):
        original = training_schedule(2, 2, schedule=name, num_chunks=chunks)
        for stage in range(2):
            tasks = original.tasks(stage)
            for at, task in enumerate(tasks):
                changes = {"without": tasks[:at] + tasks[at + 1 :], "twice": tasks[:at] + [task] + tasks[at:]}
                if at + 1 < len(tasks):
                    changes["late"] = tasks[:at] + [tasks[at + 1], task] + tasks[at + 2 :]
                for change, order in changes.items():
                    orders = [original.tasks(0), original.tasks(1)]
                    orders[stage] = order
                    schedule = _Changed(original, orders)
                    said = [_said(partial(prove, schedule)), _said(partial(rounds, schedule))]
                    yield f"{name} stage {stage} {change} {task}@{at}: {' // '.join(dict.fromkeys(said))}"


def test_what_is_said_of_faults_is_as_reviewed() -> None:
    _compare("faults.txt", [*_faults()])


F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


@pytest.mark.parametrize(
    "orders, chunks, microbatches, fault",
    [
        ([[(F, 0, 0)]], 1, 1, None),
        ([[(F, 0, 0), (I, 0, 0), (W, 0, 0)]], 1, 1, None),
        ([[(F, 0, 0), (I, 0, 0)]], 1, 1, "stage 0 never does W0"),
        ([[(F, 0, 0), (W, 0, 0)]], 1, 1, "stage 0 does W0 before the task that it depends on, or twice"),
        ([[(F, 0, 0), (B, 0, 0), (I, 0, 0)]], 1, 1, "stage 0 does I0 before the task that it depends on, or twice"),
        ([[(F, 0, 0), (I, 0, 0), (B, 0, 0)]], 1, 1, "stage 0 does B0 before the task that it depends on, or twice"),
        ([[(F, 0, 0)], [(F, 0, 0), (B, 0, 0)]], 1, 1, "stage 0 never does B0, and stage 1 does B0"),
        ([[(F, 0, 0)]] + 2 * [[(F, 0, 0), (B, 0, 0)]], 1, 1, "stage 0 never does B0, and stage 1 does B0"),
        ([[(F, 0, -1)]], 1, 1, "stage 0 does F-1, but microbatches are 0..0"),
        ([[(F, -1, 0)]], 1, 1, "stage 0 does F0.-1, but the chunks of a stage are 0..0"),
        ([[(F, 0, 1), (F, 1, 0)]], 2, 2, "stage 0 never does F0"),
        ([[(F, 0, 0), (F, 0, 1), (F, 1, 1)]], 2, 2, "stage 0 never does F0.1"),
        ([[]], 1, 0, None),
    ],
)  # fmt: skip
def test_completeness(orders: Any, chunks: int, microbatches: int, fault: str | None) -> None:
    assert fault_of([[Task(*task) for task in order] for order in orders], chunks, microbatches) == fault


def test_words() -> None:
    assert [counted(n, "stage") for n in (0, 1, "1", 2)] == ["0 stages", "1 stage", "1 stage", "2 stages"]
    assert [counted(n, "microbatch") for n in (1, "1.5")] == ["1 microbatch", "1.5 microbatches"]

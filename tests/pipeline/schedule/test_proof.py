"""Schedules that the proof rejects."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest

from neuronx_dist.pipeline.schedule import (
    Kind,
    OneFOneB,
    Schedule,
    Task,
    WrittenSchedule,
    ZeroBubbleV,
    parse_schedule,
    prove,
)
from neuronx_dist.pipeline.schedule.tasks import COMPUTATIONS, RECEIVE_FOR, RECEIVES, SEND_AFTER, SENDS


class Unchecked(Schedule):
    """Stages that do what is written, and nothing of it is looked at before `prove` does."""

    window = 100

    def __init__(self, *stages: str) -> None:
        self.stages = [parse_schedule(text) for text in stages]
        tasks = [task for stage in self.stages for task in stage]
        super().__init__(len(stages), 1 + max(task.microbatch for task in tasks))
        self.num_chunks = 1 + max(task.chunk for task in tasks)

    def computations(self, stage: int) -> list[Task]:
        return [task for task in self.stages[stage] if task.kind in COMPUTATIONS]

    def tasks(self, stage: int) -> list[Task]:
        return self.stages[stage]

    def send_window(self, kind: Kind, stage: int) -> int:
        return self.window


@pytest.mark.parametrize(
    "stages,message",
    [
        (
            ("F0 SF0 B0 RB0", "RF0 F0 B0 SB0"),
            r"^deadlock: stage 0 at B0 \(waits for SB0 of stage 1\), stage 1 at the end$",
        ),
        (("F0 SF0", "F0"), r"^deadlock: stage 0 at the end, stage 1 at F0 \(waits for SF0 of stage 0\)$"),
        (("F0", "RF0 F0"), r"^deadlock: .*stage 1 at F0 \(waits for SF0 of stage 0\)$"),
        (("F1 SF1 F0 SF0", "RF0 F0 RF1 F1"), "stage 0 sends SF1 where stage 1 expects RF0"),
        (("F0 SF0 SF0", "RF0 F0"), "stage 0 sends SF0, which stage 1 does not receive"),
        (("F0 SF0", "RF0 RF0 F0"), "stage 1 expects RF0, which stage 0 does not send"),
        (("F0 SF0", "RF0 F0 SF0"), "stage 1 does SF0, but there is no stage at the other end"),
        (("F0 I0 W0 F1 I1", "F0 B0 F1 B1"), "stage 0 never does W1"),
        (("F0 B0 F1", "F0 B0 F1 B1"), "stage 0 never does B1"),
        (("F0 B0", "F0"), "stage 1 never does B0"),
        (("F0 SF0 F1 SF1", "RF0 F0"), "stage 1 never does F1, and stage 0 does F1$"),
        (("SF0 F0", "RF0 F0"), "stage 0 does SF0 before the computation whose result it sends"),
        (("F0 SF0 F0", "RF0 F0"), "stage 0 does F0 twice"),
        (("F0 W0 I0", "F0 B0"), "stage 0 does W0 before the task that it depends on"),
        (("F0 B0 W0", "F0 B0"), "stage 0 does W0 before the task that it depends on, or twice"),
        (("F0 I0 I0 W0", "F0 B0"), "stage 0 does I0 before the task that it depends on, or twice"),
        (("B0 F0", "F0 B0"), "stage 0 does B0 before"),
        (("F0.1 F0", "F0"), "stage 1 never does F0.1"),
    ],
)
def test_it_sees(stages: tuple[str, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        prove(Unchecked(*stages))


@pytest.mark.parametrize(
    "task,message",
    [
        (Task(Kind.FORWARD, 0, 2), r"stage 0 does F2, but microbatches are 0..1"),
        (Task(Kind.FORWARD, 1, 0), r"stage 0 does F0.1, but the chunks of a stage are 0..0"),
        (Task(Kind.SEND_FORWARD, 0, 0), r"stage 0 has SF0 among its computations, but it is a message"),
    ],
)
def test_it_sees_what_is_not_of_the_schedule(task: Task, message: str) -> None:
    class More(OneFOneB):
        def computations(self, stage: int) -> list[Task]:
            return [*super().computations(stage), task]

    with pytest.raises(RuntimeError, match=message):
        prove(More(2, 2))


@pytest.mark.parametrize(
    "window,message",
    [
        (0, "stage 0 may have 0 sends in progress, which allows none: SF0"),
        (1, r"stage 0 at SF3 \(waits until SF2 is received\), stage 1 at SB1 \(waits until SB0 is received\)"),
        (2, ""),
    ],
)
def test_it_sees_a_window_that_is_too_small(window: int, message: str) -> None:
    schedule = Unchecked(
        "F0 F1 F2 F3 SF0 SF1 SF2 SF3 RB0 RB1 RB2 RB3 B0 B1 B2 B3",
        "RF0 F0 B0 SB0 RF1 F1 B1 SB1 RF2 F2 B2 SB2 RF3 F3 B3 SB3",
    )
    schedule.window = window
    with pytest.raises(RuntimeError, match=message) if message else nullcontext():
        prove(schedule)


def test_it_sees_a_window_that_is_too_small_for_zb_v() -> None:
    class TwoSends(ZeroBubbleV):
        def few_sends(self, kind: Kind, stage: int) -> int:
            return 2

    prove(ZeroBubbleV(4, 8, deallocate=True))
    with pytest.raises(RuntimeError, match=r"deadlock: .*stage 1 at SF2.1 \(waits until SF5 is received\)"):
        prove(TwoSends(4, 8, deallocate=True))


def test_it_sees_a_swapped_peer() -> None:
    class Swapped(OneFOneB):
        def peer(self, stage: int, task: Task) -> tuple[int, Task] | None:
            other_end = super().peer(stage, task)
            if other_end is None or task.kind is not Kind.SEND_FORWARD:
                return other_end
            return other_end[0], other_end[1]._replace(microbatch=task.microbatch ^ 1)

    with pytest.raises(RuntimeError, match="stage 0 sends SF0 where stage 1 expects RF0"):
        prove(Swapped(2, 4))


def test_it_sees_a_chunk_before_the_one_on_the_same_stage_that_it_follows() -> None:
    """No message connects them."""
    turned = WrittenSchedule("F0 F0.1 B0.1 B0", "F0.1 F0 B0.1 B0", holders=[0, 1, 1, 0])
    message = r"stage 1 at F0.1 \(before the computation of chunk 0 whose result it takes\)"
    with pytest.raises(RuntimeError, match=message):
        prove(turned)
    prove(WrittenSchedule("F0 F0.1 B0.1 B0", "F0 F0.1 B0.1 B0", holders=[0, 1, 1, 0]))


class Swapped(OneFOneB):
    """1F1B in which a stage does two neighbours in the other order."""

    def __init__(self, stage: int, number: int) -> None:
        super().__init__(3, 4)
        self.swapped = stage, number

    def tasks(self, stage: int) -> list[Task]:
        tasks = super().tasks(stage)
        if stage == self.swapped[0]:
            number = self.swapped[1]
            tasks[number : number + 2] = reversed(tasks[number : number + 2])
        return tasks


@pytest.mark.parametrize("stage", range(3))
def test_it_sees_two_tasks_swapped_of_which_one_needs_the_other(stage: int) -> None:
    """A message and what makes or takes it, or two messages of one channel. All other swaps do no harm."""
    for number, (first, second) in enumerate(pairwise(OneFOneB(3, 4).tasks(stage))):
        same_microbatch = first.microbatch == second.microbatch
        makes = same_microbatch and SEND_AFTER.get(first.kind) is second.kind
        takes = same_microbatch and RECEIVE_FOR.get(second.kind) is first.kind
        harm = makes or takes or (first.kind is second.kind and first.kind in SENDS | RECEIVES)
        with pytest.raises(RuntimeError) if harm else nullcontext():
            prove(Swapped(stage, number))

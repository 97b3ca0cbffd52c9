"""A schedule as text."""

from __future__ import annotations

import pytest

from neuronx_dist.pipeline.schedule import (
    Interleaved,
    Kind,
    OneFOneB,
    Schedule,
    WrittenSchedule,
    ZeroBubbleV,
    format_schedule,
    prove,
    simulate,
    training_schedule,
)


def written(schedule: Schedule, **options: list[int]) -> WrittenSchedule:
    texts = [format_schedule(schedule.computations(stage)) for stage in range(schedule.num_stages)]
    return WrittenSchedule(*texts, **options)


@pytest.mark.parametrize("schedule", [OneFOneB(3, 5), Interleaved(2, 4, 2), ZeroBubbleV(4, 8)], ids=repr)
def test_what_is_written_down_is_the_schedule(schedule: Schedule) -> None:
    same = written(schedule, holders=schedule.holders)
    assert (same.num_stages, same.num_microbatches) == (schedule.num_stages, schedule.num_microbatches)
    assert (same.num_chunks, same.holders) == (schedule.num_chunks, schedule.holders)
    for stage in range(schedule.num_stages):
        assert same.tasks(stage) == schedule.tasks(stage)
        assert same.peak_in_flight(stage) == schedule.peak_in_flight(stage)
        assert same.microbatches_until_repeat(stage) == schedule.num_microbatches  # there is only this one
        for chunk in range(schedule.num_chunks):
            assert same.virtual_stage(stage, chunk) == schedule.virtual_stage(stage, chunk)
    assert simulate(same).timeline == simulate(schedule).timeline
    assert same.bubble == pytest.approx(schedule.bubble)


def test_pieces_go_around_where_nothing_else_is_said() -> None:
    assert written(Interleaved(3, 3, 2)).holders == [0, 1, 2, 0, 1, 2]


def test_messages_that_are_written_down_stay() -> None:
    schedule = WrittenSchedule("F0 F1 SF0 SF1 RB0 RB1 B0 B1", "F0 B0 F1 B1")
    assert format_schedule(schedule.tasks(0)) == "F0 F1 SF0 SF1 RB0 RB1 B0 B1"
    assert format_schedule(schedule.tasks(1)) == "RF0 F0 RF1 B0 SB0 F1 B1 SB1"
    assert schedule.send_window(Kind.SEND_FORWARD, 0) == 2
    prove(schedule)


def test_it_trains() -> None:
    schedule = WrittenSchedule("F0 F1 B0 B1", "F0 B0 F1 B1")
    assert training_schedule(2, 2, schedule=schedule) is schedule
    with pytest.raises(ValueError, match="does not fit 2 stages and 3 microbatches"):
        training_schedule(2, 3, schedule=schedule)
    with pytest.raises(ValueError, match="no stage 2"):
        schedule.tasks(2)


@pytest.mark.parametrize(
    "stages,holders,message",
    [
        (("F0 X1 B0",), None, r"^stage 0: 'X1' is no task, such as F3 or F3.1: one of RF, F, SF, RB, B, I, W, SB,"),
        (("F0 B0", "F0 f1 B0"), None, "^stage 1: 'f1' is no task"),
        (("F0, B0",), None, "'F0,' is no task"),
        (("F B0",), None, "'F' is no task"),
        (("F0.x B0",), None, "'F0.x' is no task"),
        (
            ("F0 B0 F1 B1", "F0 B0 F1"),
            None,
            "^stage 1 never does B1, and stage 0 does B1; the strings have microbatches 0..1, chunks 0..0",
        ),
        (("F0 B0 F2 B2",), None, "^stage 0 never does F1"),
        (("F0 F0.1 B0.1", "F0 F0.1 B0.1 B0"), None, r"^stage 0 never does B0, and stage 1 does B0; .*chunks 0..1"),
        (("F0 B0 B0",), None, "^stage 0 does B0 before the task that it depends on, or twice"),
        (("F0 B0", ""), None, "^stage 1 never does F0"),
        ((), None, "one string for each stage, as in .*, got none"),
        ((["F0", "B0"], ["F0", "B0"]), None, r"one string for each stage, as in .*, got \['F0', 'B0'\], \['F0'"),
        (("F0 B0", "F0 B0"), [0, 1, 1], r"each of 2 stages as often as it has chunks, which is 1, got \[0, 1, 1\]"),
        (("F0 F0.1", "F0 F0.1"), [0, 1, 1, 2], "each of 2 stages"),
    ],
)
def test_what_is_wrong(stages: tuple[str, ...], holders: list[int] | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WrittenSchedule(*stages, holders=holders)

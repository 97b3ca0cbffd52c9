"""Properties of every schedule: nothing twice, nothing too early, no deadlock, and its formulas as counted."""

from __future__ import annotations

import doctest
import os
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest

import neuronx_dist.pipeline.schedule as schedule_package
from neuronx_dist.pipeline.schedule import (
    Costs,
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
    parse_schedule,
    prove,
    rounds,
    simulate,
)
from neuronx_dist.pipeline.schedule.tasks import COMPUTATIONS, RECEIVES, SENDS
from tests.support.strict_transport import strict_step_time
from tests.support.toy_schedules import Around, Halves, ThereAndBack

FULL = os.environ.get("NXD_FULL") == "1"
STAGES = range(1, 9) if FULL else (1, 2, 3, 5, 8)
MICROBATCHES = range(1, 33) if FULL else (1, 2, 3, 5, 8, 11)

SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "1f1b": OneFOneB,
    "gpipe": GPipe,
    **{f"interleaved {v}": lambda stages, microbatches, v=v: Interleaved(stages, microbatches, v) for v in (2, 3, 4)},
    "zb_h1": ZeroBubbleH1,
    "zb_v": ZeroBubbleV,
    "halves": Halves,
    "around": Around,
    "there and back": ThereAndBack,
}
SIZES = list(product(STAGES, MICROBATCHES))

every_schedule = pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)] if FULL else pytest.mark.slow


def orders(schedule: Schedule) -> list[list[Task]]:
    return [schedule.computations(stage) for stage in range(schedule.num_stages)]


@every_schedule
def test_every_forward_and_every_half_of_a_backward_once_and_in_order(make: Callable[[int, int], Schedule]) -> None:
    """Counted here, and not by the package: a whole backward is both halves."""
    for stages, microbatches in SIZES:
        schedule = make(stages, microbatches)
        for order in orders(schedule):
            parts = []
            for kind, chunk, microbatch in order:
                kinds = "IW" if kind is Kind.BACKWARD else kind.value
                parts += [(kind, chunk, microbatch) for kind in kinds]
            expected = product("FIW", range(schedule.num_chunks), range(microbatches))
            assert sorted(parts) == sorted(expected), (stages, microbatches)
            when = {part: number for number, part in enumerate(parts)}
            for _, chunk, microbatch in parts:
                assert when["F", chunk, microbatch] < when["I", chunk, microbatch] < when["W", chunk, microbatch]


@every_schedule
def test_what_needs_another_comes_after_it_and_messages_pair_up(make: Callable[[int, int], Schedule]) -> None:
    """With the strictest transport, without deadlock. So do forwards alone."""
    for stages, microbatches in SIZES:
        schedule = make(stages, microbatches)
        prove(schedule)
        prove(Inference(stages, microbatches, schedule))


@every_schedule
def test_formulas_are_what_is_counted(make: Callable[[int, int], Schedule]) -> None:
    for stages, microbatches in SIZES:
        schedule = make(stages, microbatches)
        simulation = simulate(schedule)
        assert [schedule.peak_in_flight(stage) for stage in range(stages)] == simulation.peak_in_flight
        assert schedule.bubble == pytest.approx(simulation.bubble, abs=1e-12), (stages, microbatches)


@pytest.mark.parametrize("name", ["1f1b", "interleaved 2", "interleaved 3", "zb_h1", "zb_v", "gpipe"])
def test_windows_cost_no_time(name: str) -> None:
    """Neither that a receive is posted only one computation ahead, nor that a send waits for the window before it."""
    for stages, microbatches in product(STAGES, (1, 3, 8, 17) if FULL else (1, 3, 11)):
        schedule = SCHEDULES[name](stages, microbatches)
        for costs in (Costs(), Costs(1.0, 1.5, 0.75)):
            ideal = simulate(schedule, costs).step_time
            for schedule.deallocate in (False, True):
                assert strict_step_time(schedule, costs) == pytest.approx(ideal), (stages, microbatches)
        inference = Inference(stages, microbatches, schedule)
        assert strict_step_time(inference, Costs()) == pytest.approx(simulate(inference).step_time)


@every_schedule
def test_windows_of_sends(make: Callable[[int, int], Schedule]) -> None:
    """Deallocated outputs leave sooner, and no schedule deadlocks. Without bounded sends none ever waits."""
    for stages, microbatches in SIZES:
        schedule = make(stages, microbatches)
        for schedule.deallocate in (False, True):
            prove(schedule)
            prove(Inference(stages, microbatches, schedule))
            for stage in range(stages):
                few = [schedule.few_sends(kind, stage) for kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)]
                activations, gradients = few
                if not schedule.deallocate:
                    activations = max(activations, schedule.peak_in_flight(stage))
                if isinstance(schedule, Around):
                    activations = gradients = 2 * microbatches
                assert schedule.send_window(Kind.SEND_FORWARD, stage) == activations
                assert schedule.send_window(Kind.SEND_BACKWARD, stage) == gradients


def test_few_sends() -> None:
    """Two, but where a message is needed only after others that the same stage sends."""

    def few(schedule: Schedule, kind: Kind) -> list[int]:
        return [schedule.few_sends(kind, stage) for stage in range(schedule.num_stages)]

    for schedule in (OneFOneB(4, 8), GPipe(4, 8), ZeroBubbleH1(4, 8), Interleaved(4, 8, 3)):
        assert few(schedule, Kind.SEND_FORWARD) == few(schedule, Kind.SEND_BACKWARD) == [2, 2, 2, 2]
    assert few(ZeroBubbleV(4, 8), Kind.SEND_FORWARD) == [4, 3, 2, 2]
    assert few(ZeroBubbleV(4, 8), Kind.SEND_BACKWARD) == [2, 2, 2, 2]
    assert few(Interleaved(4, 7, 2), Kind.SEND_FORWARD) == [2, 2, 2, 3]
    assert few(Interleaved(4, 7, 2), Kind.SEND_BACKWARD) == [3, 2, 2, 2]


@every_schedule
def test_messages_have_two_ends(make: Callable[[int, int], Schedule]) -> None:
    """Each send has one receive, of which it is the peer in turn; none is left over, and none is sent twice."""
    for stages, microbatches in product(range(1, 9), (1, 2, 5)):
        for schedule in (make(stages, microbatches), Inference(stages, microbatches, make(stages, microbatches))):
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
            ways = 1 if isinstance(schedule, Inference) else 2
            handed_over = sum(a == b for a, b in zip(schedule.holders, schedule.holders[1:]))
            boundaries = schedule.num_virtual_stages - 1 - handed_over
            assert len(sends) == ways * boundaries * microbatches


@every_schedule
def test_virtual_stages_and_their_holders(make: Callable[[int, int], Schedule]) -> None:
    for stages in range(1, 9):
        for schedule in (make(stages, 2), Inference(stages, 2, make(stages, 2))):
            holders = [schedule.holder(position) for position in range(schedule.num_virtual_stages)]
            expected = [(stage, chunk) for stage in range(stages) for chunk in range(schedule.num_chunks)]
            assert sorted(holders) == expected
            assert [schedule.virtual_stage(*holder) for holder in holders] == list(range(schedule.num_virtual_stages))


@every_schedule
def test_receives_are_posted_before_the_computation_that_precedes_their_use(
    make: Callable[[int, int], Schedule],
) -> None:
    uses = {Kind.RECV_FORWARD: (Kind.FORWARD,), Kind.RECV_BACKWARD: (Kind.BACKWARD, Kind.BACKWARD_INPUT)}
    for stages, microbatches in [(1, 1), (2, 3), (4, 2), (4, 4), (8, 16)]:
        for stage in range(stages):
            tasks = make(stages, microbatches).tasks(stage)
            computations = [task for task in tasks if task.kind in COMPUTATIONS]
            for task in tasks:
                if task.kind in RECEIVES:
                    use = next(i for i, c in enumerate(computations) if c[1:] == task[1:] and c.kind in uses[task.kind])
                    if use > 0:
                        assert tasks.index(task) < tasks.index(computations[use - 1])


@every_schedule
def test_rounds_do_the_same(make: Callable[[int, int], Schedule]) -> None:
    """Stages in lockstep do all computations in the schedule's order."""
    for stages, microbatches in product((1, 2, 4), (1, 3, 8)):
        schedule = make(stages, microbatches)
        played = rounds(schedule)
        for stage, order in enumerate(orders(schedule)):
            assert [play.tasks[stage] for play in played if play.tasks[stage] is not None] == order


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("around", "there and back")])
def test_fewer_microbatches_show_all_that_a_stage_holds(name: str) -> None:
    """Fewer than twice the stages for each chunk, or all; with as many the peak is that of the whole step."""
    for stages, microbatches in product((1, 2, 4, 8) if FULL else (1, 2, 4), (1, 5, 40)):
        schedule = SCHEDULES[name](stages, microbatches)
        for stage in range(stages):
            number = schedule.microbatches_until_repeat(stage)
            assert 1 <= number <= microbatches
            assert SCHEDULES[name](stages, number).peak_in_flight(stage) == schedule.peak_in_flight(stage)
            if microbatches == 40 and name not in ("gpipe", "halves"):
                assert number <= 3 * stages + 3


def test_two_ways_between_two_stages() -> None:
    """Then a queue for both ways would not do: a transport needs one for each."""
    assert ZeroBubbleV(2, 4).both_ways and ZeroBubbleV(4, 4).both_ways and ThereAndBack(3, 1).both_ways
    assert Interleaved(2, 4, 2).both_ways
    one_way = (Interleaved(3, 4, 2), OneFOneB(2, 4), ZeroBubbleH1(4, 4), OneFOneB(1, 1), ZeroBubbleV(1, 4))
    assert not any(schedule.both_ways for schedule in one_way)


def test_examples_in_docstrings() -> None:
    examples = []
    for name in [name for name in sys.modules if name.startswith(schedule_package.__name__)]:
        examples += doctest.DocTestFinder().find(sys.modules[name], globs=vars(schedule_package))
    failures = [case.name for case in examples if doctest.DocTestRunner(verbose=False).run(case).failed]
    assert failures == []
    assert sum(len(case.examples) for case in examples) >= 8


def test_prints_compactly_and_reads_what_it_prints() -> None:
    assert format_schedule(OneFOneB(2, 2).tasks(0)) == "F0 SF0 RB0 F1 SF1 RB1 B0 B1"
    assert format_schedule(OneFOneB(2, 2).tasks(1)) == "RF0 F0 RF1 B0 SB0 F1 B1 SB1"
    assert format_schedule(OneFOneB(1, 2).tasks(0)) == "F0 B0 F1 B1"
    assert format_schedule(Inference(3, 2).tasks(1)) == "RF0 RF1 F0 SF0 F1 SF1"
    assert format_schedule(Halves(2, 1).tasks(1)) == "RF0 F0 I0 SB0 W0"
    assert format_schedule(Around(2, 1).tasks(0)) == "RF0.1 F0 SF0 RB0.1 F0.1 SF0.1 RB0 B0.1 SB0.1 B0"
    assert repr(Around(2, 1)) == "Around(num_stages=2, num_microbatches=1, num_chunks=2)"
    for make in SCHEDULES.values():
        for stage in range(3):
            tasks = make(3, 12).tasks(stage)
            assert parse_schedule(format_schedule(tasks)) == tasks


@every_schedule
@pytest.mark.parametrize("sizes", [(0, 2), (-1, 2), (2, 0), (2, -3)])
def test_no_stage_or_no_microbatch(make: Callable[[int, int], Schedule], sizes: tuple[int, int]) -> None:
    what = "num_stages" if sizes[0] < 1 else "num_microbatches"
    with pytest.raises(ValueError, match=f"{what} must be at least 1, got {min(sizes)}"):
        make(*sizes)


@every_schedule
@pytest.mark.parametrize("stage", [-1, 2])
def test_no_such_stage(make: Callable[[int, int], Schedule], stage: int) -> None:
    with pytest.raises(ValueError, match=rf"there is no stage {stage} in a pipeline of 2 \(0..1\)"):
        make(2, 2).tasks(stage)


def test_a_computation_has_no_other_end() -> None:
    with pytest.raises(ValueError, match="F0 is a computation"):
        OneFOneB(2, 1).peer(0, Task(Kind.FORWARD, 0, 0))


def test_what_trains() -> None:
    assert OneFOneB(4, 8).trains and ZeroBubbleV(4, 8).trains and not Inference(4, 8).trains

"""ZB-V: no bubble, with the memory of 1F1B."""

from __future__ import annotations

import pytest

from neuronx_dist.pipeline.schedule import Costs, OneFOneB, ZeroBubbleV, format_schedule, simulate


def test_the_order() -> None:
    """Down the line of stages with chunk 0, up again with chunk 1; each stage full as soon as its work is there."""
    schedule = ZeroBubbleV(2, 4)
    assert schedule.holders == [0, 1, 1, 0]
    assert format_schedule(schedule.computations(0)) == (
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 F3 I0 W0 F2.1 I2.1 W2.1 I1 W1 F3.1 I3.1 W3.1 I2 W2 I3 W3"
    )
    assert format_schedule(schedule.computations(1)) == (
        "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 F3 I1 W1 F3.1 I2.1 W2.1 I2 I3.1 I3 W2 W3.1 W3"
    )


@pytest.mark.parametrize("stages", range(1, 9))
def test_no_stage_waits_between_its_first_and_its_last_task(stages: int) -> None:
    """At equal costs, from 2 p - 1 microbatches on; a whole step is longer by the later starts alone."""
    for microbatches in (1, 2, 3, max(1, 2 * stages - 2), 2 * stages - 1, 2 * stages, 2 * stages + 1, 24):
        simulation = simulate(ZeroBubbleV(stages, microbatches))
        waits = [timed[-1].end - timed[0].start - 6 * microbatches for timed in simulation.timeline]
        assert (max(waits) == 0) == (microbatches >= 2 * stages - 1)
        assert simulation.step_time == 6 * microbatches + max(stages - 1, 4 * (stages - 1) - 2 * (microbatches - 1))


@pytest.mark.parametrize("stages", range(1, 9))
def test_the_memory_is_that_of_1f1b(stages: int) -> None:
    """2 p activations of a chunk, which is half a stage: on every stage what 1F1B keeps on its first."""
    for microbatches in (2 * stages, 2 * stages + 1, 24):
        halves = simulate(ZeroBubbleV(stages, microbatches), Costs(activation=0.5))
        assert halves.peak_memory == [stages] * stages
        assert simulate(OneFOneB(stages, microbatches)).peak_memory[0] == stages


def test_it_is_faster_than_1f1b() -> None:
    """By more than 15 % at 4 stages and 8 microbatches, where a chunk takes half as long as a stage."""
    chunks = simulate(ZeroBubbleV(4, 8), Costs(0.5, 0.5, 0.5)).step_time
    assert (chunks, simulate(OneFOneB(4, 8)).step_time) == (25.5, 33)

"""ZB-H1: the bubble and the memory of the paper."""

from __future__ import annotations

import pytest

from neuronx_dist.pipeline.schedule import Costs, OneFOneB, ZeroBubbleH1, format_schedule, simulate

# Figure 2 of "Zero Bubble Pipeline Parallelism", 4 stages, 8 microbatches: stage `s` begins with weight gradients `s`
# microbatches late.
FIGURE = (
    "F0 F1 F2 F3 I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 F7 I4 W4 I5 W5 I6 W6 I7 W7",
    "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 F7 I5 W4 I6 W5 I7 W6 W7",
    "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 F7 I6 W4 I7 W5 W6 W7",
    "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 F7 I7 W4 W5 W6 W7",
)


def test_the_order_is_the_papers() -> None:
    assert tuple(format_schedule(ZeroBubbleH1(4, 8).computations(stage)) for stage in range(4)) == FIGURE


@pytest.mark.parametrize("forward,input_half,weight_half", [(1, 1, 1), (2, 3, 2), (1, 2, 1), (3, 5, 1), (2, 2, 2)])
def test_the_bubble_is_the_papers(forward: float, input_half: float, weight_half: float) -> None:
    """Table 1 of the paper: (p - 1)(F + I - W), where 1F1B has (p - 1)(F + I + W); from p microbatches on."""
    costs = Costs(forward, input_half, weight_half)
    for stages in range(1, 9):
        for microbatches in (stages, stages + 1, 2 * stages + 1, 16):
            work = microbatches * (forward + input_half + weight_half)
            expected = work + (stages - 1) * (forward + input_half - weight_half)
            assert simulate(ZeroBubbleH1(stages, microbatches), costs).step_time == expected
            others = work + (stages - 1) * (forward + input_half + weight_half)
            assert simulate(OneFOneB(stages, microbatches), costs).step_time == others


def test_the_memory_is_that_of_1f1b() -> None:
    """The most that any stage keeps; 1F1B's last stages keep less."""
    for stages in range(1, 9):
        for microbatches in (1, 2, 5, 8, 13):
            peaks = simulate(ZeroBubbleH1(stages, microbatches)).peak_in_flight
            assert max(peaks) == max(simulate(OneFOneB(stages, microbatches)).peak_in_flight)
            assert peaks == [min(stages, microbatches)] * stages

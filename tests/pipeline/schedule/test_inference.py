"""Forwards alone, in the order and the placement of any schedule of training."""

from __future__ import annotations

import pytest

from neuronx_dist.pipeline.schedule import (
    Inference,
    Interleaved,
    OneFOneB,
    ZeroBubbleV,
    format_schedule,
    rounds,
    simulate,
)


def test_the_forwards_of_training() -> None:
    assert format_schedule(Inference(2, 3).computations(1)) == "F0 F1 F2"
    assert format_schedule(Inference(2, 3, Interleaved(2, 3, 2)).computations(0)) == "F0 F1 F2 F0.1 F1.1 F2.1"
    assert Inference(3, 4, ZeroBubbleV(3, 4)).holders == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize("stages", range(1, 9))
def test_no_order_of_forwards_is_faster(stages: int) -> None:
    """A stage waits only until its first task, and after its last one for those of the stages behind it."""
    for microbatches in (1, 2, 3, 7, 8, 9, 16):
        assert len(rounds(Inference(stages, microbatches))) == microbatches + stages - 1
        for chunks in (2, 3, 4):
            inference = Inference(stages, microbatches, Interleaved(stages, microbatches, chunks))
            waits = stages - 1 + (chunks - 1) * max(0, stages - microbatches)
            assert simulate(inference).step_time == chunks * microbatches + waits
        inference = Inference(stages, microbatches, ZeroBubbleV(stages, microbatches))
        assert simulate(inference).step_time == 2 * microbatches + 2 * (stages - 1)


def test_nothing_is_kept() -> None:
    inference = Inference(2, 4, Interleaved(2, 4, 2))
    assert inference.peak_in_flight(0) == 0 and simulate(inference).peak_in_flight == [0, 0]
    assert simulate(inference).peak_memory == [0.0, 0.0]


@pytest.mark.parametrize("stages,microbatches", [(2, 4), (3, 5)])
def test_training_of_other_sizes(stages: int, microbatches: int) -> None:
    with pytest.raises(ValueError, match=r"num_microbatches=5\) has no forwards for [23] stages and [45] microbatches"):
        Inference(stages, microbatches, OneFOneB(2, 5))

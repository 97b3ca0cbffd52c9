"""Schedules by name, number of chunks or a user's own schedule."""

from __future__ import annotations

from typing import Any

import pytest

from neuronx_dist.pipeline.schedule import (
    GPipe,
    Inference,
    Interleaved,
    OneFOneB,
    Schedule,
    ZeroBubbleH1,
    ZeroBubbleV,
    training_schedule,
)


@pytest.mark.parametrize(
    "options,expected,num_chunks",
    [
        ({}, OneFOneB, 1),
        ({"num_chunks": 3}, Interleaved, 3),
        ({"schedule": "1f1b"}, OneFOneB, 1),
        ({"schedule": "interleaved", "num_chunks": 2}, Interleaved, 2),
        ({"schedule": "gpipe", "num_chunks": 1}, GPipe, 1),
        ({"schedule": "zb_h1"}, ZeroBubbleH1, 1),
        ({"schedule": "zb_v"}, ZeroBubbleV, 2),
        ({"schedule": "zb_v", "num_chunks": 2}, ZeroBubbleV, 2),
        ({"schedule": ZeroBubbleV(4, 8)}, ZeroBubbleV, 2),
        ({"schedule": Interleaved(4, 8, 3), "num_chunks": 3}, Interleaved, 3),
        ({"schedule": GPipe}, GPipe, 1),
        ({"schedule": lambda stages, microbatches: Interleaved(stages, microbatches, 2)}, Interleaved, 2),
    ],
)
def test_the_schedule_of_training(options: dict[str, Any], expected: type[Schedule], num_chunks: int) -> None:
    schedule = training_schedule(4, 8, **options)
    assert type(schedule) is expected
    assert (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks) == (4, 8, num_chunks)
    if isinstance(options.get("schedule"), Schedule):
        assert schedule is options["schedule"]


@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"schedule": "zb_w"}, ValueError, "there is no schedule 'zb_w'; there are '1f1b', 'interleaved', 'gpipe', "),
        ({"num_chunks": 0}, ValueError, "num_chunks must be at least 1, got 0"),
        ({"schedule": "interleaved"}, ValueError, "at least 2 chunks on each stage, got 1 .virtual_pipeline_size."),
        (
            {"schedule": "zb_v", "num_chunks": 3},
            ValueError,
            "2 chunks on each stage, not 3 .*use 2 .or 1, its",
        ),
        (
            {"schedule": "1f1b", "num_chunks": 2},
            ValueError,
            "1 chunk on each stage, not 2 .*use 1; .*'interl",
        ),
        ({"schedule": "zb_h1", "num_chunks": 2}, ValueError, "1 chunk on each stage, not 2"),
        ({"schedule": "gpipe", "num_chunks": 2}, ValueError, "1 chunk on each stage, not 2"),
        ({"schedule": Interleaved(4, 8, 3), "num_chunks": 2}, ValueError, "3 chunks on each stage, not 2"),
        ({"schedule": GPipe(4, 7)}, ValueError, "num_microbatches=7.* does not fit 4 stages and 8 microbatches"),
        ({"schedule": lambda stages, microbatches: GPipe(2, 8)}, ValueError, "num_stages=2.* does not fit 4 stages"),
        ({"schedule": Inference(4, 8)}, ValueError, "Inference.* has no backwards, so it cannot train"),
        ({"schedule": 3}, TypeError, "one of '1f1b'.* or a function .*, got 3"),
        ({"schedule": lambda stages, microbatches: "1f1b"}, TypeError, "must return a Schedule, got '1f1b'"),
    ],
)
def test_what_does_not_fit(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        training_schedule(4, 8, **options)

"""A route says what the schedule says, of every task."""

from __future__ import annotations

import copy
import pickle

import pytest

from neuronx_dist.pipeline.schedule import Kind, Task, training_schedule
from neuronx_dist.pipeline.schedule.tasks import COMPUTATIONS, RECEIVE_FOR, SEND_AFTER, SENDS


@pytest.mark.parametrize("name,chunks", [("1f1b", 1), ("gpipe", 1), ("interleaved", 3), ("zb_h1", 1), ("zb_v", 2)])
@pytest.mark.parametrize("stages,microbatches", [(1, 3), (2, 4), (4, 6)])
def test_a_route_is_what_the_schedule_says(name: str, chunks: int, stages: int, microbatches: int) -> None:
    schedule = training_schedule(stages, microbatches, schedule=name, num_chunks=chunks)
    for stage in range(stages):
        route = schedule.route(stage)
        assert schedule.route(stage) is route
        assert list(route.tasks) == schedule.tasks(stage)
        assert route.windows == {kind: schedule.send_window(kind, stage) for kind in SENDS}
        messages = [task for task in route.tasks if task.kind not in COMPUTATIONS]
        for task in schedule.computations(stage):
            for links, kinds in ((route.before, RECEIVE_FOR), (route.after, SEND_AFTER)):
                message = task._replace(kind=kinds[task.kind]) if task.kind in kinds else None
                other_end = None if message is None else schedule.peer(stage, message)
                if other_end is None:
                    assert task not in links
                else:
                    assert links[task] == (message, *other_end)
                    assert (message in messages) == (links[task].stage != stage)
        assert all(route.other_stage[message] == schedule.peer(stage, message)[0] for message in messages)
    with pytest.raises(ValueError, match="there is no stage"):
        schedule.route(stages)


def test_a_kind_is_the_same_key_after_a_copy() -> None:
    """Kinds hash by identity, which survives copies and pickles."""
    task = Task(Kind.FORWARD, 0, 3)
    assert {task: 1}[pickle.loads(pickle.dumps(task))] == {task: 1}[copy.deepcopy(task)] == 1
    assert hash(Kind("F")) == hash(Kind.FORWARD)

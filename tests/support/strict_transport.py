"""Time of a step with the strictest transport: a message moves when both ends have posted it."""

from __future__ import annotations

from collections import deque

from neuronx_dist.pipeline.schedule import Costs, Kind, Schedule, Task
from neuronx_dist.pipeline.schedule.tasks import OTHER_END, RECEIVE_FOR, RECEIVES, SENDS

__all__ = ["strict_step_time"]


def strict_step_time(schedule: Schedule, costs: Costs) -> float:
    """Task by task, messages included: what `simulate` would say if receives were posted late or sends awaited."""
    orders = [schedule.tasks(stage) for stage in range(schedule.num_stages)]
    done = [0] * schedule.num_stages
    now = [0.0] * schedule.num_stages
    posted: dict[tuple[int, int, Kind], tuple[deque, deque]] = {}  # by channel: sends, receives
    sends: dict[tuple[int, Kind], list[Task]] = {}
    moved: dict[tuple[int, Task], float] = {}
    while sum(done) < sum(map(len, orders)):
        before = sum(done)
        for stage, tasks in enumerate(orders):
            while done[stage] < len(tasks):
                task = tasks[done[stage]]
                if task.kind in SENDS | RECEIVES:
                    other = schedule.peer(stage, task)
                    assert other is not None
                    ends = (
                        (stage, other[0], task.kind) if task.kind in SENDS else (other[0], stage, OTHER_END[task.kind])
                    )
                    if task.kind in SENDS:
                        earlier = sends.setdefault((stage, task.kind), [])
                        window = schedule.send_window(task.kind, stage)
                        if len(earlier) >= window:
                            if (stage, earlier[-window]) not in moved:
                                break
                            now[stage] = max(now[stage], moved[stage, earlier[-window]])
                        earlier.append(task)
                    posted.setdefault(ends, (deque(), deque()))[task.kind in RECEIVES].append((task, now[stage]))
                else:
                    if task.kind in RECEIVE_FOR:
                        receive = task._replace(kind=RECEIVE_FOR[task.kind])
                        if schedule.is_message(stage, receive):
                            if (stage, receive) not in moved:
                                break
                            now[stage] = max(now[stage], moved[stage, receive])
                    now[stage] += costs.time(stage, task)
                done[stage] += 1
        for (source, target, _), (out, into) in posted.items():
            while out and into:
                (send, sent_at), (receive, received_at) = out.popleft(), into.popleft()
                moved[source, send] = moved[target, receive] = max(sent_at, received_at) + costs.latency(source, target)
        assert sum(done) > before, "deadlock"
    return max(now)

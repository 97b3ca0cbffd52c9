"""When each task of a schedule starts and ends, and what it keeps meanwhile, by the costs of tasks and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .tasks import RECEIVE_FOR, SEND_AFTER, Kind, Task

__all__ = ["Cost", "Costs", "MemoryInUse", "TimedTask", "bubble_of", "memory_of", "timeline_of"]

Cost = float | Callable[[int, int], float]


@dataclass(frozen=True)
class Costs:
    """What tasks and messages cost, in any unit of time and of memory.

    Each is a number, or a function of two: of a computation `(stage, chunk) -> cost`, of a message
    `(source stage, target stage) -> cost`.

    Attributes:
        forward, backward_input, backward_weight: time of one task, that is of one chunk. A whole backward takes the
            sum of its halves.
        message: time from the end of the task that makes a tensor to the earliest start of the task that needs it,
            where these are on two stages. A send costs its stage nothing: it computes on, and never waits for one.
        activation: memory that a forward keeps for its backward.
        weight_activation: what of it stays when the input half of the backward is over; None: all of it.
    """

    forward: Cost = 1.0
    backward_input: Cost = 1.0
    backward_weight: Cost = 1.0
    message: Cost = 0.0
    activation: Cost = 1.0
    weight_activation: Cost | None = None

    def time(self, stage: int, task: Task) -> float:
        """Of a computation."""
        if task.kind is Kind.FORWARD:
            return _value(self.forward, stage, task.chunk)
        time = 0.0
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            time += _value(self.backward_input, stage, task.chunk)
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            time += _value(self.backward_weight, stage, task.chunk)
        return time

    def kept(self, stage: int, task: Task) -> float:
        """Memory that a computation keeps or, if negative, frees."""
        whole = _value(self.activation, stage, task.chunk)
        rest = whole if self.weight_activation is None else _value(self.weight_activation, stage, task.chunk)
        if task.kind is Kind.FORWARD:
            return whole
        if task.kind is Kind.BACKWARD:
            return -whole
        return rest - whole if task.kind is Kind.BACKWARD_INPUT else -rest

    def latency(self, source: int, target: int) -> float:
        """Of a message from one stage to another; none where both are one."""
        return 0.0 if source == target else _value(self.message, source, target)


def _value(cost: Cost, first: int, second: int) -> float:
    return cost(first, second) if callable(cost) else cost


class TimedTask(NamedTuple):
    """A computation, and when it is done."""

    task: Task
    start: float
    end: float


def timeline_of(
    orders: Sequence[Sequence[Task]], peer: Callable[[int, Task], tuple[int, Task] | None], costs: Costs
) -> list[list[TimedTask]]:
    """Every computation as early as its stage and its input allow, by stage.

    Args:
        orders: the computations of each stage.
        peer: `Schedule.peer`.

    Raises:
        RuntimeError: computations wait for each other, or for one that never comes, with those that wait.
    """
    timeline: list[list[TimedTask]] = [[] for _ in orders]
    arrivals: dict[tuple[int, Task], float] = {}  # by stage and receive
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            timed = timeline[stage]
            for task in order[len(timed) :]:
                arrival = _arrival(stage, task, peer, arrivals)
                if arrival is None:
                    break
                start = max(arrival, timed[-1].end if timed else 0.0)
                timed.append(TimedTask(task, start, end := start + costs.time(stage, task)))
                progress = True
                if task.kind in SEND_AFTER:
                    other_end = peer(stage, task._replace(kind=SEND_AFTER[task.kind]))
                    if other_end is not None:
                        arrivals[other_end] = end + costs.latency(stage, other_end[0])
    waiting = [
        f"stage {stage} at {order[len(timed)]}"
        for stage, (order, timed) in enumerate(zip(orders, timeline))
        if len(timed) < len(order)
    ]
    if waiting:
        raise RuntimeError(f"these wait for what never comes: {', '.join(waiting)}")
    return timeline


def _arrival(
    stage: int,
    task: Task,
    peer: Callable[[int, Task], tuple[int, Task] | None],
    arrivals: dict[tuple[int, Task], float],
) -> float | None:
    """When a computation has what it needs; None: not yet known."""
    if task.kind not in RECEIVE_FOR:
        return 0.0
    receive = task._replace(kind=RECEIVE_FOR[task.kind])
    return arrivals.get((stage, receive)) if peer(stage, receive) is not None else 0.0


def bubble_of(timeline: Sequence[Sequence[TimedTask]]) -> float:
    """Share of a step in which a stage waits, on the average of stages. 0 where nothing takes any time."""
    step_time = max((timed[-1].end for timed in timeline if timed), default=0.0)
    busy = sum(each.end - each.start for timed in timeline for each in timed)
    return 1 - busy / (len(timeline) * step_time) if step_time else 0.0


class MemoryInUse(NamedTuple):
    """How much a stage keeps from a time on, until the next change."""

    time: float
    amount: float


def memory_of(stage: int, timed: Sequence[TimedTask], costs: Costs) -> list[MemoryInUse]:
    """The activations that a stage keeps: from the start of a forward to the end of its backward, by halves.

    Without any backward nothing is kept.
    """
    changes = [MemoryInUse(0.0, 0.0)]
    if all(each.task.kind is Kind.FORWARD for each in timed):
        return changes
    amount = 0.0
    for each in timed:
        change = costs.kept(stage, each.task)
        amount += change
        if change:
            changes.append(MemoryInUse(each.start if each.task.kind is Kind.FORWARD else each.end, amount))
    return changes

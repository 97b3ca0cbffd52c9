"""What a step takes, by the costs of tasks and messages: time, waiting, memory."""

from __future__ import annotations

from typing import NamedTuple

from .in_flight import most_in_flight
from .proof import prove
from .schedule import Schedule
from .timing import Costs, MemoryInUse, TimedTask, bubble_of, memory_of, timeline_of

__all__ = ["Simulation", "simulate"]


class Simulation(NamedTuple):
    """What `simulate` computed; lists are by stage.

    Attributes:
        step_time: from the start of the first task to the end of the last, on any stage.
        bubble: share of it in which a stage waits, on the average of stages.
        timeline: when each computation starts and ends.
        memory: activations that are kept, as changes in time, from 0 on.
        peak_memory: the most of it.
        peak_in_flight: the most forwards (of a microbatch in a chunk) whose backward is not over.
    """

    step_time: float
    bubble: float
    timeline: list[list[TimedTask]]
    memory: list[list[MemoryInUse]]
    peak_memory: list[float]
    peak_in_flight: list[int]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Proves that a schedule runs, and computes what a step of it takes.

    Each stage does its computations in their order, each as soon as the stage is free and what it needs has come.

        >>> simulate(OneFOneB(num_stages=4, num_microbatches=8), Costs(backward_weight=2)).step_time
        44.0

    Args:
        costs: None: a forward takes 1, each half of a backward 1, messages nothing; a forward keeps 1.

    Raises:
        RuntimeError: the schedule can't run; see `prove`.
    """
    prove(schedule)
    costs = costs or Costs()
    orders = [schedule.computations(stage) for stage in range(schedule.num_stages)]
    timeline = timeline_of(orders, schedule.peer, costs)
    memory = [memory_of(stage, timed, costs) for stage, timed in enumerate(timeline)]
    return Simulation(
        step_time=max(timed[-1].end for timed in timeline),
        bubble=bubble_of(timeline),
        timeline=timeline,
        memory=memory,
        peak_memory=[max(each.amount for each in changes) for changes in memory],
        peak_in_flight=[most_in_flight(order) for order in orders],
    )

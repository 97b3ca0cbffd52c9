"""`Simulator`: the seconds of a pipeline's step, by its schedule; fast enough for hundreds of layouts.

A schedule's tasks are put in an order in which each comes after all that it waits for, once; for each set of costs a
single pass over them gives the same times as `pipeline.schedule.simulate`. With many microbatches a part of the step is
simulated, of which the rest are repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

from ..pipeline.schedule import Costs, Kind, Schedule
from ..pipeline.schedule.analysis import timeline_of
from ..pipeline.schedule.tasks import RECEIVE_FOR

__all__ = ["Simulator", "StageCosts"]

#: By stage and chunk, the seconds of a forward, and of the halves of its backward: inputs, weights.
StageCosts = Sequence[Sequence[tuple[float, float, float]]]

_FEWEST = 6  # microbatches that are simulated, in numbers of stages
_PARTS = {Kind.FORWARD: 0, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 2, Kind.BACKWARD: 3}


class Step(NamedTuple):
    """A task of a program: the stage; the index of its cost; the number of the task whose result it takes, or -1."""

    stage: int
    cost: int
    source: int
    is_message: bool


class Simulator:
    """Simulates schedules, of which each is put in order once."""

    def __init__(self) -> None:
        self._programs: dict[Any, list[Step]] = {}

    def step_time(self, schedule: Schedule, costs: StageCosts, message: float) -> float:
        """Returns the seconds from the first task to the last.

        Args:
            message: seconds of a message between stages.
        """
        pp, total = schedule.num_stages, schedule.num_microbatches
        if pp == 1:
            return total * sum(map(sum, costs[0]))
        few = _FEWEST * pp + total % pp
        if total <= few + pp:
            return self.simulated(schedule, costs, message)
        once = self.simulated(_of_microbatches(schedule, few), costs, message)
        again = self.simulated(_of_microbatches(schedule, few + pp), costs, message)
        busiest = max(sum(map(sum, chunks)) for chunks in costs)
        return max(again + (again - once) * ((total - few - pp) // pp), total * busiest)

    def simulated(self, schedule: Schedule, costs: StageCosts, message: float) -> float:
        """Returns the seconds from the first task to the last, of all microbatches one by one."""
        chunks = schedule.num_chunks
        flat: list[float] = []
        for of_stage in costs:
            for forward, inputs, weights in of_stage:
                flat += (forward, inputs, weights, inputs + weights)
        free = [0.0] * schedule.num_stages
        ends: list[float] = []
        append = ends.append
        assert len(flat) == 4 * chunks * schedule.num_stages
        for stage, cost, source, is_message in self._program(schedule):
            start = free[stage]
            if source >= 0:
                arrival = ends[source] + message if is_message else ends[source]
                if arrival > start:
                    start = arrival
            free[stage] = end = start + flat[cost]
            append(end)
        return max(free)

    def _program(self, schedule: Schedule) -> list[Step]:
        key = type(schedule), schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
        if key not in self._programs:
            self._programs[key] = _ordered(schedule)
        return self._programs[key]


def _of_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    shorter = copy(schedule)
    shorter.num_microbatches = num_microbatches
    return shorter


def _ordered(schedule: Schedule) -> list[Step]:
    """Returns the tasks of all stages in the order of their starts, if all take equally long."""
    orders = [schedule.computations(stage) for stage in range(schedule.num_stages)]
    timeline = timeline_of(orders, schedule.peer, Costs())
    timed = sorted((task.start, stage, number) for stage, tasks in enumerate(timeline) for number, task in enumerate(tasks))
    numbers: dict[tuple[int, Kind, int, int], int] = {}
    steps = []
    for index, (_, stage, number) in enumerate(timed):
        task = timeline[stage][number].task
        numbers[stage, task.kind, task.chunk, task.microbatch] = index
        source, is_message = -1, False
        if task.kind in RECEIVE_FOR:
            sender = schedule.peer(stage, task._replace(kind=RECEIVE_FOR[task.kind]))
            if sender is not None:
                other = sender[0]
                kinds = (Kind.FORWARD,) if task.kind is Kind.FORWARD else (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                found = (numbers.get((other, kind, sender[1].chunk, task.microbatch)) for kind in kinds)
                source, is_message = next(x for x in found if x is not None), other != stage
        cost = 4 * (stage * schedule.num_chunks + task.chunk) + _PARTS[task.kind]
        steps.append(Step(stage, cost, source, is_message))
    return steps

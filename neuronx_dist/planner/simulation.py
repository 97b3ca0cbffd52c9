"""`Simulator`: the seconds of a pipeline's step, by its schedule; fast enough for hundreds of layouts.

A schedule's tasks are put in an order in which each comes after all that it waits for, once; for each set of costs a
single pass over them gives the same times as `pipeline.schedule.simulate`. With many microbatches a part of the step is
simulated, of which the rest are repetitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

from ..pipeline.schedule import Kind, Schedule

__all__ = ["Simulator", "StageCosts"]

#: By stage and chunk, the seconds of a forward, and of the halves of its backward: inputs, weights.
StageCosts = Sequence[Sequence[tuple[float, float, float]]]

_PER_STAGE, _FEWEST = 6, 24  # microbatches that are simulated, at least
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
        few = pp * -(-max(_PER_STAGE * pp, _FEWEST) // pp) + total % pp
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
    """Returns the tasks of all stages in an order in which each comes after the task whose result it takes.

    Raises:
        RuntimeError: tasks wait for each other.
    """
    chunks, last = schedule.num_chunks, schedule.num_virtual_stages - 1
    orders = [schedule.computations(stage) for stage in range(schedule.num_stages)]
    places = [[schedule.virtual_stage(stage, chunk) for chunk in range(chunks)] for stage in range(len(orders))]
    holders = [schedule.holder(place)[0] for place in range(last + 1)]
    forwards: dict[tuple[int, int], int] = {}  # by position in the model and microbatch: the number of the task
    backwards: dict[tuple[int, int], int] = {}
    steps: list[Step] = []
    done = [0] * len(orders)
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                kind, chunk, microbatch = order[done[stage]]
                place, source, other = places[stage][chunk], -1, stage
                if kind is Kind.FORWARD:
                    if place > 0:
                        source, other = forwards.get((place - 1, microbatch), -2), holders[place - 1]
                elif kind is not Kind.BACKWARD_WEIGHT and place < last:
                    source, other = backwards.get((place + 1, microbatch), -2), holders[place + 1]
                if source == -2:  # not there yet
                    break
                if kind is Kind.FORWARD:
                    forwards[place, microbatch] = len(steps)
                elif kind is not Kind.BACKWARD_WEIGHT:
                    backwards[place, microbatch] = len(steps)
                steps.append(Step(stage, 4 * (stage * chunks + chunk) + _PARTS[kind], source, other != stage))
                done[stage] += 1
                progress = True
    if any(number < len(order) for number, order in zip(done, orders)):
        raise RuntimeError(f"{schedule}: tasks wait for tasks that never come")
    return steps

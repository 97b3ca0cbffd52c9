"""`Simulator`: the seconds of a pipeline's step, by its schedule; fast enough for hundreds of layouts.

A schedule's tasks are put in an order in which each comes after all that it waits for, once; for each set of costs a
single pass over them gives the same times as `pipeline.schedule.simulate`. With many microbatches a part of the step is
simulated, of which the rest are repetitions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

from ..pipeline.schedule import Kind, Schedule

__all__ = ["Simulator", "StageCosts"]

#: By stage and chunk, the seconds of a forward, and of the halves of its backward: inputs, weights.
StageCosts = Sequence[Sequence[tuple[float, float, float]]]

_PER_STAGE, _FEWEST = 6, 24  # microbatches that are simulated, at least
_PARTS = {Kind.FORWARD: 0, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 2, Kind.BACKWARD: 3}


class Program(NamedTuple):
    """Tasks of all stages in an order in which each comes after the task whose result it takes.

    Attributes:
        codes: by task, `4 * (stage * num_chunks + chunk)` plus 0 to 3: its part in `_PARTS`.
        sources: by task, the number from 1 of the task whose result it takes; 0: none.
        messages: by code, whether that result comes from another stage.
    """

    codes: array[int]
    sources: array[int]
    messages: list[bool]


class Simulator:
    """Simulates schedules, of which each is put in order once."""

    def __init__(self) -> None:
        self._programs: dict[Any, Program] = {}

    def step_time(self, schedule: Schedule, costs: StageCosts, message: float) -> float:
        """Returns the seconds from the first task to the last.

        Args:
            message: seconds of a message between stages.
        """
        pp, total = schedule.num_stages, schedule.num_microbatches
        if pp == 1:
            return total * sum(map(sum, costs[0]))
        shortened = _shortened(schedule)
        once, *more = (self.simulated(few, costs, message) for few in shortened)
        if not more:
            return once
        (again,), left = more, total - shortened[1].num_microbatches
        busiest = max(sum(map(sum, chunks)) for chunks in costs)
        return max(again + (again - once) * (left // pp), total * busiest)

    def tasks(self, schedule: Schedule) -> int:
        """Returns the number of tasks that `step_time` goes through, of several stages."""
        return sum(len(self._program(shorter).codes) for shorter in _shortened(schedule))

    def simulated(self, schedule: Schedule, costs: StageCosts, message: float) -> float:
        """Returns the seconds from the first task to the last, of all microbatches one by one."""
        chunks = schedule.num_chunks
        seconds: list[float] = []
        for of_stage in costs:
            for forward, inputs, weights in of_stage:
                seconds += (forward, inputs, weights, inputs + weights)
        assert len(seconds) == 4 * chunks * schedule.num_stages
        program = self._program(schedule)
        stages = [code // (4 * chunks) for code in range(len(seconds))]
        delays = [message if is_message else 0.0 for is_message in program.messages]
        free = [0.0] * schedule.num_stages
        ends = [0.0]
        append = ends.append
        for code, source in zip(program.codes, program.sources):
            stage = stages[code]
            start, arrival = free[stage], ends[source] + delays[code]
            if arrival > start:
                start = arrival
            free[stage] = end = start + seconds[code]
            append(end)
        return max(free)

    def _program(self, schedule: Schedule) -> Program:
        key = type(schedule), schedule.num_stages, schedule.num_microbatches, schedule.num_chunks
        if key not in self._programs:
            self._programs[key] = _ordered(schedule)
        return self._programs[key]


def _shortened(schedule: Schedule) -> list[Schedule]:
    """Returns a pipeline's schedule, or, of many microbatches, two of few, which differ by one for each stage."""
    pp, total = schedule.num_stages, schedule.num_microbatches
    few = pp * -(-max(_PER_STAGE * pp, _FEWEST) // pp) + total % pp
    return [schedule] if total <= few + pp else [_of_microbatches(schedule, few), _of_microbatches(schedule, few + pp)]


def _of_microbatches(schedule: Schedule, num_microbatches: int) -> Schedule:
    shorter = copy(schedule)
    shorter.num_microbatches = num_microbatches
    return shorter


def _ordered(schedule: Schedule) -> Program:
    """Returns the tasks of all stages in an order in which each comes after the task whose result it takes.

    Raises:
        RuntimeError: tasks wait for each other.
    """
    chunks, microbatches = schedule.num_chunks, schedule.num_microbatches
    holders = [schedule.holder(place)[0] for place in range(schedule.num_virtual_stages)]
    # By position in the model and microbatch, the number of the task; -1: it is not there yet. Before the first forward
    # and after the last one nothing is waited for.
    forwards = [[0] * microbatches, *([-1] * microbatches for _ in holders)]
    backwards = [*([-1] * microbatches for _ in holders), [0] * microbatches]
    nothing, unused = [0] * microbatches, [0] * microbatches
    messages = [False] * (4 * chunks * schedule.num_stages)
    tables: list[dict[tuple[Kind, int], tuple[int, list[int], list[int]]]] = []
    for stage in range(schedule.num_stages):
        table = {}
        for chunk in range(chunks):
            place, code = schedule.virtual_stage(stage, chunk), 4 * (stage * chunks + chunk)
            messages[code] = place > 0 and holders[place - 1] != stage
            messages[code + 1] = messages[code + 3] = place + 1 < len(holders) and holders[place + 1] != stage
            waits = backwards[place + 1], backwards[place]
            table[Kind.FORWARD, chunk] = code, forwards[place], forwards[place + 1]
            table[Kind.BACKWARD_INPUT, chunk] = code + _PARTS[Kind.BACKWARD_INPUT], *waits
            table[Kind.BACKWARD_WEIGHT, chunk] = code + _PARTS[Kind.BACKWARD_WEIGHT], nothing, unused
            table[Kind.BACKWARD, chunk] = code + _PARTS[Kind.BACKWARD], *waits
        tables.append(table)
    left = [iter(schedule.computations(stage)) for stage in range(schedule.num_stages)]
    tasks = [next(order, None) for order in left]
    codes, sources = array("i"), array("i")
    number, before = 0, -1
    while number > before:
        before = number
        for stage, task in enumerate(tasks):
            table, order = tables[stage], left[stage]
            while task is not None:
                kind, chunk, microbatch = task
                code, waits_for, results = table[kind, chunk]
                source = waits_for[microbatch]
                if source < 0:  # not there yet
                    break
                number += 1
                results[microbatch] = number
                codes.append(code)
                sources.append(source)
                task = next(order, None)
            tasks[stage] = task
    if any(task is not None for task in tasks):
        raise RuntimeError(f"{schedule}: tasks wait for tasks that never come")
    return Program(codes, sources, messages)

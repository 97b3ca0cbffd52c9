"""The first calls of pipeline stages such that the slowest stage is as fast as possible: exact, for any job.

`step_cuts.py` has those of a job with a number of microbatches, by its simulated step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from math import inf

import torch

from ...planning.plan import PlanError
from ...program.program import Division, Value, operands_of
from .conversions import RowsOfExperts
from .exact import StrategyChoice

__all__ = ["balanced", "between_experts", "sent_before", "stage_starts"]


def stage_starts(
    problem: StrategyChoice, division: Division, count: int, allowed: Collection[int] | None = None
) -> list[int]:
    """Returns the index of each pipeline stage's first call such that the slowest stage is as fast as possible.

    Args:
        allowed: the calls at which a stage may begin; None: all.

    Raises:
        PlanError: there are fewer calls than stages, or fewer allowed ones.
    """
    times = problem.tables.times(division.strategies, division.type_of)
    waits = sent_before(problem, division, lambda nbytes: problem.costs.communicate(nbytes, 1))
    if never := between_experts(division):
        allowed = {*(range(len(times)) if allowed is None else allowed)} - never.keys()
    if allowed is not None:
        if len({*allowed} - {0}) < count - 1:
            raise PlanError(
                f"pipeline: {count} stages need {count - 1} calls at which one may begin, not {len(allowed)}"
            )
        waits = [seconds if number in allowed else inf for number, seconds in enumerate(waits)]
    try:
        return balanced(times, waits, count)
    except ValueError as error:
        raise PlanError(f"pipeline: {error}") from None


def between_experts(division: Division) -> dict[int, Value]:
    """Returns the calls at which no stage may begin, each with a value that the stage would receive.

    The routing decides how many rows of divided experts a rank has, and messages have fixed shapes.
    """
    calls = division.program.calls
    last = {value: number for number, call in enumerate(calls) for value in operands_of(call)}
    return {
        place: value
        for number, call in enumerate(calls)
        for value in call.results
        if any(isinstance(spmd_type, RowsOfExperts) for spmd_type in (*value.outer, division.type_of(value)))
        for place in range(number + 1, last.get(value, number) + 1)
    }


def balanced(times: Sequence[float], crossing: Sequence[float], count: int) -> list[int]:
    """Returns the index of each stage's first call such that the slowest stage is as fast as possible.

    Method: dynamic programming of the linear partition problem.

    Args:
        times: seconds of each call.
        crossing: by call, seconds of receiving the values of earlier stages if a stage begins at this call.
        count: number of stages.

    Raises:
        ValueError: there are fewer calls than stages.
    """
    if not 1 <= count <= len(times):
        raise ValueError(f"{len(times)} calls cannot be cut into {count} stages: at most {len(times)}")
    until = torch.tensor([0.0, *accumulate(times)], dtype=torch.float64)
    waits = torch.tensor([0.0, *crossing[1:]], dtype=torch.float64)
    slowest = until.clone()  # by number of calls: seconds of the slowest stage if these are cut into `stage` stages
    starts: list[torch.Tensor] = []
    for stage in range(1, count):
        least, first = torch.full_like(slowest, torch.inf), torch.zeros(len(until), dtype=torch.int64)
        for end in range(stage + 1, len(until)):
            seconds = until[end] - until[stage:end] + waits[stage:end]
            worst = torch.maximum(seconds, slowest[stage:end])
            best = int(worst.argmin())
            least[end], first[end] = worst[best], best + stage
        slowest = least
        starts.append(first)
    cuts, end = [], len(times)
    for first in reversed(starts):
        end = int(first[end])
        cuts.append(end)
    return [0, *reversed(cuts)]


def sent_before(
    problem: StrategyChoice, division: Division, cost: Callable[[float], float] = lambda nbytes: nbytes
) -> list[float]:
    """Returns, by call, the bytes that a stage receives which begins with it, or the sum of the `cost` of each value.

    Values that depend on inputs only are computed on every stage that reads them, and not sent.
    """
    program = problem.program
    dependent = set(program.parameters)
    last: dict[Value, int] = {}
    for number, call in enumerate(program.calls):
        last.update(dict.fromkeys(operands_of(call), number))
        if not dependent.isdisjoint(operands_of(call)):
            dependent.update(call.results)
    change = [0.0] * (len(program.calls) + 1)  # difference of the cost between a cut and the cut before
    for number, call in enumerate(program.calls):
        for value in call.results:
            if value in dependent and last.get(value, number) > number:
                sent = cost(problem.tables.local(value.nbytes, division.type_of(value)))
                change[number + 1] += sent
                change[last[value] + 1] -= sent
    return list(accumulate(change))[:-1]

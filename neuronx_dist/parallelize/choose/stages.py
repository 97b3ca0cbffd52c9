"""The pipeline stages of a division: the calls that each stage runs, and the values that stages send.

    calls 0 .. 5, stages [0, 3]:   stage 0 runs 0, 1, 2 and sends the values that later calls read; stage 1 runs 3, 4, 5

A value goes from hop to hop through the stages between its producer and its last reader, once, in the type that it was
made in. Values that depend on no parameter (masks, positions) are not sent: each stage that reads them computes them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from itertools import pairwise, product
from typing import NamedTuple

from ...pipeline.schedule import Schedule, WrittenSchedule, training_schedule
from ...planning.plan import PlanError
from ...program.program import Call, Division, Program, Value, values_in

__all__ = ["StageCalls", "kept_by", "same_calls", "schedule_of", "stages_of", "starts_like"]


class StageCalls(NamedTuple):
    """Calls and transfers of one pipeline stage for each microbatch.

    Attributes:
        calls: the calls in program order.
        received: the values that the previous stage sends, in the order in which they are computed; `sent`: the values
            that the next stage receives.
    """

    calls: list[Call]
    received: list[Value]
    sent: list[Value]


def stages_of(division: Division) -> list[StageCalls]:
    """Returns the stages of a division, in order; without a pipeline, one stage that has all calls.

    Raises:
        PlanError: a buffer is read on a stage before the one that writes it.
    """
    program = division.program
    bounds = [*division.stages, len(program.calls)]
    bounds[0] = 0
    if len(bounds) == 2:
        return [StageCalls(list(program.calls), [], [])]
    home = {call: stage for stage, ends in enumerate(pairwise(bounds)) for call in program.calls[slice(*ends)]}
    writers = {value: home[call] for call in program.calls for value in _written(call)}
    for call in program.calls:  # calls that read a written buffer run on the stage that writes it
        home[call] = max([home[call], *(writers[value] for value in _read(call) if value in writers)])
    free = _free(program)
    order = {call: number for number, call in enumerate(program.calls)}
    wanted: list[set[Value]] = [set() for _ in division.stages]  # values that each stage receives from earlier ones
    calls: list[list[Call]] = []
    for stage in range(len(division.stages)):
        stage_calls = {call for call in program.calls if home[call] == stage and call not in free}
        pending = [value for call in stage_calls for value in _read(call)]
        if stage == len(division.stages) - 1:
            pending += values_in(program.outputs)
        while pending:
            value = pending.pop()
            producer = value.producer
            if producer is None or producer in stage_calls:
                continue
            if producer in free:
                stage_calls.add(producer)
                pending += _read(producer)
            elif home[producer] > stage:
                raise PlanError(
                    f"stage {stage} reads {value!r}, computed from a buffer that the later stage {home[producer]} "
                    "writes: cut the pipeline elsewhere (graph.staging)"
                )
            else:
                for passed in range(home[producer] + 1, stage + 1):
                    wanted[passed].add(value)
        calls.append(sorted(stage_calls, key=order.__getitem__))
    received = [sorted(values, key=lambda value: _position(value, order)) for values in wanted]
    return [StageCalls(*parts) for parts in zip(calls, received, [*received[1:], []], strict=True)]


def kept_by(divisions: Iterable[Division]) -> dict[str, tuple[int, ...]]:
    """Returns the stages that read each parameter and buffer, by its name in the module."""
    readers: dict[str, set[int]] = {}
    for division in divisions:
        for number, stage in enumerate(stages_of(division)):
            for call in stage.calls:
                for value in _read(call):
                    if value.kind in ("parameter", "buffer"):
                        readers.setdefault(value.path, set()).add(number)
    return {path: tuple(sorted(stages)) for path, stages in readers.items()}


def starts_like(division: Division, program: Program) -> list[int]:
    """Returns the cuts of another program of the same module (evaluation) at the stages of a division.

    Every call is on a stage that holds the parameters and buffers that it reads. A stage whose calls the other program
    all lacks gets the nearest of the other calls.

    Raises:
        PlanError: a stage would have no call.
    """
    calls, others = division.program.calls, program.calls
    same = same_calls(calls, others)
    starts = [0]
    for start in division.stages[1:]:
        starts.append(next((same[number] for number in range(start, len(calls)) if number in same), len(others)))
    if sorted(set(starts)) == starts and starts[-1] < len(others):
        return starts
    holders: dict[str, set[int]] = {}
    for number, call in enumerate(calls):
        for value in _read(call):
            if value.kind in ("parameter", "buffer"):
                holders.setdefault(value.path, set()).add(bisect_right(division.stages, number) - 1)
    wanted = [bisect_right(starts, number) - 1 for number in range(len(others))]
    allowed = [[holders[v.path] for v in _read(call) if v.path in holders and v.kind != "input"] for call in others]
    filled = _filled(wanted, allowed, len(starts))
    if filled is None:
        raise PlanError(
            f"the module runs {len(calls)} calls in training and {len(others)} in evaluation: stages that begin at "
            f"calls {division.stages} in training begin at {starts} in evaluation, so one is empty: cut elsewhere, or "
            "use fewer stages"
        )
    return [filled.index(stage) for stage in range(len(starts))]


def same_calls(calls: Sequence[Call], others: Sequence[Call]) -> dict[int, int]:
    """Returns for calls of a program the same calls of another program of its module, both by number."""
    matcher = SequenceMatcher(None, [*map(_place, calls)], [*map(_place, others)], autojunk=False)
    return {a + n: b + n for a, b, size in matcher.get_matching_blocks() for n in range(size)}


def _filled(wanted: Sequence[int], allowed: Sequence[Sequence[set[int]]], count: int) -> list[int] | None:
    """Returns the stage of each call nearest to `wanted`: ascending, no stage empty, each call on an allowed stage.

    Args:
        allowed: by call, sets of stages that must all contain its stage.
    """
    # By stage of the last call so far: the least total distance from `wanted`, and the calls' stages.
    best: list[tuple[float, list[int]]] = [(0.0 if last == 0 else math.inf, []) for last in range(count)]
    for number, (stage, sets) in enumerate(zip(wanted, allowed)):
        following: list[tuple[float, list[int]]] = []
        for last in range(count):
            distance, before = best[last] if number == 0 else min(best[max(last - 1, 0) : last + 1], key=lambda b: b[0])
            if any(last not in allowed_stages for allowed_stages in sets):
                distance = math.inf
            following.append((distance + abs(last - stage), [*before, last]))
        best = following
    distance, stages = best[-1]
    return stages if distance < math.inf else None


def _place(call: Call) -> tuple[str, str, str]:
    return call.name, call.where, call.module


def schedule_of(ranks: int, stages: int, microbatches: int, name: str) -> Schedule:
    """Returns the schedule of `stages` stages on `ranks` groups of ranks.

    Args:
        name: a name of `pipeline.schedule`, or "chimera_direct".

    Raises:
        ValueError: the schedule does not go with these numbers.
    """
    if name == "chimera_direct":
        if (ranks, stages) != (4, 4) or microbatches % 2:
            raise ValueError(
                f"pipeline schedule 'chimera_direct' has 4 stages on 4 groups of ranks and an even number of "
                f"microbatches, got {stages} stages on {ranks} groups and {microbatches} microbatches: use '1f1b'"
            )
        return WrittenSchedule(*map(" ".join, _chimera_direct(microbatches // 2)))
    return training_schedule(ranks, microbatches, schedule=name, num_chunks=stages // ranks)


def _chimera_direct(pairs: int) -> list[list[str]]:
    """Returns the tasks of 4 stages, in order: two microbatches at a time, one of them a few steps ahead."""
    orders = []
    for stage in range(4):
        steps = {"F0": stage, "F1": (2, 3, 4, 6)[stage], "B0": 10 - 2 * stage, "B1": 14 - 2 * stage}
        placed = []
        for pair, (task, step) in product(range(pairs), steps.items()):
            early = 3 if task == "F0" and stage < 2 and pair else 0  # before the last backward of the pair before
            placed.append((16 * pair + step - early, f"{task[0]}{2 * pair + int(task[1])}"))
        orders.append([task for _, task in sorted(placed)])
    return orders


def _read(call: Call) -> list[Value]:
    return list(values_in((call.args, call.kwargs)))


def _position(value: Value, order: dict[Call, int]) -> tuple[int, int]:
    assert value.producer is not None
    return order[value.producer], value.producer.results.index(value)


def _free(program: Program) -> set[Call]:
    """Returns the calls that every stage may repeat: they depend on inputs and constants only, and have no effects."""
    written = {value for call in program.calls for value in _written(call)}
    bound = {*program.parameters, *written}
    free = set()
    for call in program.calls:
        if call.random or call.writes or not bound.isdisjoint(_read(call)):
            bound.update(call.results)
        else:
            free.add(call)
    return free


def _written(call: Call) -> list[Value]:
    return [value for value in _read(call) if value.kind == "buffer"] if call.writes else []

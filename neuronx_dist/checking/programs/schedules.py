"""Comparison of the stages of a pipeline: one model, cut equally; one schedule, which comes to an end."""

from __future__ import annotations

from itertools import zip_longest

from ...mesh import Mesh
from ...pipeline.run.comparison import SAME_ARGUMENTS, difference
from ...pipeline.schedule import Schedule, prove
from ..report import Problem
from .explore import Explored

__all__ = ["compare_schedules"]


def compare_schedules(explored: Explored) -> list[Problem]:
    """Problems of a pipeline's ranks: other models, cuts or schedules, or microbatches that come to no end.

    The messages of all microbatches are played in the order of each stage.
    """
    problems = []
    for program in explored.distinct:
        if program.schedule is None:
            continue
        first = explored.mesh.group_of("pp", program.rank)[0]
        head = explored.programs.get(first, program)
        if head.schedule is None:
            continue
        stage = explored.mesh.coordinate("pp", program.rank)
        other = _difference(head.schedule, program.schedule, stage)
        if other is not None:
            what = (
                f"ranks {first} and {program.rank} are stages 0 and {stage} of one pipeline, and have different "
                f"schedules: {other}\n    Give NxDPPModel the same schedule and sizes on all ranks."
            )
            problems.append(Problem("pipeline", what, (first, program.rank)))
        elif program.pieces is not None and head.pieces is not None and program.pieces != head.pieces:
            statements = {first: head.pieces.in_full(), program.rank: program.pieces.in_full()}
            what = f"{difference(statements, explored.mesh)}\n    {SAME_ARGUMENTS}"
            problems.append(Problem("pipeline", what, (first, program.rank)))
        elif stage == 0:
            problems += _stuck_schedule(explored.mesh, program.rank, program.schedule)
    return problems[:1]  # ranks that differ from one differ from others too


def _difference(expected: Schedule, actual: Schedule, stage: int) -> str | None:
    """The first difference between a stage's tasks (`actual`) and those that stage 0 expects of it."""
    both = f"{expected} and {actual}"
    if expected.num_stages != actual.num_stages or expected.holders != actual.holders:
        return f"{both}, in which stages hold the pieces {expected.holders} and {actual.holders}"
    computations = expected.computations(stage), actual.computations(stage)
    for one, other in (computations, (expected.tasks(stage), actual.tasks(stage))):
        for first, second in zip_longest(one, other, fillvalue="nothing more"):
            if first != second:
                return f"{both}: stage {stage} does {first} in the first where it does {second} in the second"
    return None


def _stuck_schedule(mesh: Mesh, rank: int, schedule: Schedule) -> list[Problem]:
    try:
        prove(schedule)
    except RuntimeError as error:
        what = (
            f"the schedule of {schedule.num_microbatches} microbatches over {schedule.num_stages} stages cannot run: "
            f"{error}"
        )
        return [Problem("pipeline", what, mesh.group_of("pp", rank), error=error)]
    return []

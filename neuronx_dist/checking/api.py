"""`spmd.check`: a parallel model proven right in one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from ..call_site import LIBRARY, USER, nearest_line, owner_of
from ..mesh import DENSE_AXES, Mesh
from ..spmd.axes import PartOfAxisError, mesh_of
from ..spmd.errors import SpmdTypeError
from .programs.branches import compare_branches, compare_claims, differences
from .programs.calls import Deadline, OutOfTime
from .programs.compare import compare_events
from .programs.explore import Explored, PhaseFailure, explore
from .programs.numeric import compare_values
from .programs.played import ReadsValues, Subject
from .programs.schedules import compare_schedules
from .report import Problem, Report
from .types.read_numbers import Decisions

__all__ = ["check"]

LEVELS = ("G", "L")


def check(
    model_fn: Callable[..., Any],
    example_inputs: Any,
    mesh: Mapping[str, int] | Mesh,
    *,
    options: Mapping[str, Any] | None = None,
    step: Callable[[Any, Any, Any], Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    in_types: Any = None,
    level: str | None = "G",
    numeric: bool = False,
    raise_errors: bool = False,
    time_limit: float | None = None,
    confirm: bool = True,
) -> Report:
    """Plays and compares a training step of every rank that can differ, without processes, weights or values.

    The check compares the collectives of all ranks, group by group: their order, shapes and dtypes, in forward and
    backward. It compares the messages between stages, and the schedule over all microbatches. The program of each
    rank has to run, with the shapes of that rank.

    Args:
        model_fn: `model_fn(**options)` builds the model of the current rank, as a training script does, up to the
            point where values would be needed: no `materialize`, no loading of weights. It is called on the meta device
            with the rank and the mesh set. It returns a module, an `NxDPPModel`, or `(model, optimizer)`. A module
            in its place is copied for each rank.
        example_inputs: of one rank and one step: keyword arguments in a dict, positional ones in a tuple, one tensor,
            or a function without arguments that makes them. Only shapes and dtypes count.
        mesh: sizes of the axes, `{"pp": 2, "dp": 2, "tp": 4}`, or a Mesh.
        options: for `model_fn`.
        step: `step(model, optimizer, inputs)` makes a whole step: forward, loss, backward, reduction of gradients,
            optimizer. `inputs` is all of the example inputs: the dict or the tuple itself.
            None: `run_train` of an NxDPPModel; of another module its call, the backward of the loss in what
            it returns, `reduce_gradients`; and then the optimizer's step.
        optimizer: `optimizer(params)`, where `model_fn` makes none; None: SGD (in ZeRO-1 where the model wants it).
        in_types: types of the inputs by name and axis; None: sharded on dim 0 over dp, replicated over tp.
        level: "G": the program equals the unsharded one; "L": it is consistent on all ranks; None: types are not
            checked.
        numeric: run the model for real too, on threads and in one process, and compare. For toy sizes.
        raise_errors: raise the first problem instead of returning it in the report.
        time_limit: seconds after which to stop; the report then says that it is not finished.
        confirm: play a second rank of each program too, in case that Python code uses a rank's number where the check
            does not see it. False: a third faster.

    Returns:
        A report: `report.ok`, `report.problems`, `str(report)`, `report.details()`, `report.to_json()`.

    Raises:
        ValueError: the mesh or the level is not valid.
        TypeError: `model_fn` cannot be called.
        SpmdTypeError: with `raise_errors`, there is a problem.
    """
    deadline = Deadline(time_limit)
    grid = mesh_of(mesh)
    if level is not None and level not in LEVELS:
        raise ValueError(f"check: level {level!r} is neither 'G' (global) nor 'L' (local)")
    if isinstance(model_fn, nn.Module):
        module = model_fn
        model_fn = lambda: module  # noqa: E731
    if not callable(model_fn):
        raise TypeError(
            f"check: model_fn is a {type(model_fn).__name__}: pass a function that builds the model of the current "
            "rank, such as the class of a module, or `lambda: Model(config)`"
        )
    caller = nearest_line(USER)
    subject = Subject(model_fn, example_inputs, dict(options or {}), step, optimizer, in_types, level)
    report = Report(_sizes(grid), level=level)
    report.unchecked = [axis for axis in (*DENSE_AXES, "ep") if grid.size(axis) == 1 and axis in _named(mesh)]
    explored, grid = _explore(subject, grid, deadline, confirm)
    _simplify(explored, caller)
    problems = _problems(explored, grid, step is not None)
    if subject.decisions.lines and explored.finished:  # branches on numbers that were read: the other ones
        other, _ = _explore(replace(subject, decisions=Decisions(False)), grid, deadline, confirm)
        _simplify(other, caller)
        others = _problems(other, grid, step is not None)
        if problems and not others and all(problem.kind == "program" for problem in problems):
            explored, problems = other, others  # the first one has ended where a program ends for bad numbers
        elif not problems:
            problems = [problem for problem in others if problem.kind != "program"]
        explored.assumed.update(other.assumed)
        explored.trusted.update(other.trusted)
    _fill(report, explored)
    for problem in problems:
        report.add(problem)
    if numeric and report.ok:
        try:
            found = compare_values(subject, grid, deadline, report.notes)
            report.numeric = found is not None
            for problem in found or ():
                report.add(problem)
        except OutOfTime:
            report.finished = False
        except Exception as error:  # noqa: B902 - a finding, whatever it is
            what = f"running it with values failed: {type(error).__name__}: {error}"
            report.add(Problem("values", what, lines=tuple(_lines(error)), error=error))
    report.seconds = deadline.elapsed
    if raise_errors and report.problems:
        raise _as_error(report)
    return report


def _explore(subject: Subject, grid: Mesh, deadline: Deadline, confirm: bool) -> tuple[Explored, Mesh]:
    """Explores the programs of all ranks; returns also the mesh, with the model's replicas over a part of tp."""
    explored = explore(subject, grid, deadline, confirm)
    parts = {replicas for program in explored.distinct if (replicas := _replicas(program.failure)) is not None}
    if len(parts) == 1:  # types are written on parts from the start
        grid = replace(grid, tp_replicas=parts.pop())
        explored = explore(subject, grid, deadline, confirm)
    return explored, grid


def _problems(explored: Explored, grid: Mesh, own_step: bool) -> list[Problem]:
    """The problems of the schedules; if there are none, of the ranks' programs, alone and in comparison."""
    problems = [*compare_schedules(explored)]
    if problems:
        return problems  # the rest follows from different schedules
    failures: dict[tuple[str, str], list[PhaseFailure]] = {}  # one problem for equal failures on several ranks
    for program in explored.distinct:
        if program.failure is not None:
            error = program.failure.error
            failures.setdefault((type(error).__name__, str(error)), []).append(program.failure)
    problems = [_problem(same, grid, own_step) for same in failures.values()]
    if problems or not explored.finished:
        return problems
    return compare_claims(explored) or compare_events(explored) or compare_branches(explored)


def _replicas(failure: PhaseFailure | None) -> int | tuple[int, ...] | None:
    error = failure.error if failure is not None else None
    return error.replicas if isinstance(error, PartOfAxisError) else None


def _sizes(mesh: Mesh) -> dict[str, int]:
    sizes = {axis: mesh.size(axis) for axis in DENSE_AXES}
    return {**sizes, "ep": mesh.ep} if mesh.ep > 1 else sizes


def _named(mesh: Mapping[str, int] | Mesh) -> set[str]:
    """Axes to list in the report: the axes that the caller named, and the usual ones."""
    return {"pp", "dp", "cp", "tp"} | (set() if isinstance(mesh, Mesh) else set(mesh))


def _simplify(explored: Explored, caller: str) -> None:
    """Replaces the line of what the check itself calls, which is no line of the user's, by that of this package."""
    for program in explored.distinct:
        for event in program.events:
            if event.where == caller or event.where.startswith(("<", "an unknown")):
                event.where = event.inside


def _fill(report: Report, explored: Explored) -> None:
    first: dict[int, Any] = {}
    for program in explored.distinct:
        first.setdefault(explored.mesh.coordinate("pp", program.rank), program)
    report.operators = sum(len(program.ops) for program in first.values())
    report.collectives = sum(len(program.events) for program in first.values())
    report.programs = len({program.signature() for program in explored.distinct})
    report.runs = explored.plays
    report.finished = explored.finished
    report.differences = differences(explored)
    report.trusted = [f"{where}: {text}" for where, text in explored.trusted]
    report.assumed = [f"{where}: {text}" for where, text in explored.assumed]


def _problem(failures: Sequence[PhaseFailure], mesh: Mesh, own_step: bool) -> Problem:
    """The problem to report for phases that raised."""
    failure = failures[0]
    error = failure.error
    lines = _lines(error.__cause__ if isinstance(error, ReadsValues) and error.__cause__ else error)
    kind = "types" if isinstance(error, SpmdTypeError) else "program"
    axes = DENSE_AXES if mesh.ep == 1 else (*DENSE_AXES, "ep")
    at = mesh.coordinates(failure.rank)
    coordinates = ", ".join(f"{axis} {at[axis]}" for axis in axes if mesh.size(axis) > 1)
    train = "the step" if own_step else "forward and backward"
    what = {"build": "building the model", "train": train, "step": "the optimizer's step"}
    ranks_text = f"rank {failure.rank}" + (f" ({coordinates})" if coordinates else "")
    ranks = tuple(same.rank for same in failures)
    if len(ranks) > 1:
        ranks_text += f", and of {_and(ranks[1:])}"
    name = "" if kind == "types" or isinstance(error, ReadsValues) else f"{type(error).__name__}: "
    message = f"{name}{error}\n    in {what[failure.phase]} of {ranks_text}" + (f", at {lines[0]}" if lines else "")
    return Problem(kind, message, ranks, tuple(lines), error)


def _and(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:6])) + (", ..." if len(ranks) > 6 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _lines(error: BaseException) -> list[str]:
    """The lines of the traceback outside torch and this package, innermost first; else those of this package."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if owner_of(frame.filename) == USER]
    package_frames = [frame for frame in frames if owner_of(frame.filename) not in (USER, LIBRARY)]
    return [f"{frame.filename}:{frame.lineno}" for frame in reversed(user_frames or package_frames[-1:])]


def _as_error(report: Report) -> SpmdTypeError:
    first = report.problems[0]
    if isinstance(first.error, SpmdTypeError):
        return first.error
    error = SpmdTypeError(str(report))
    error.__cause__ = first.error
    return error

"""A division as a `Plan`, which is a file, and a plan as constraints on the choice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

from ...planning.plan import CallPlan, Plan, PlanError, TensorPlan
from ...program.program import Call, Division, Program, Strategy, Value
from ...spmd.types import I, R, S, SpmdType
from ..choose.conversions import WholeOnRank
from ..choose.local_program import LocalProgram, local_program
from .graph import IRGraph

__all__ = ["apply_plan", "plan_of"]


def plan_of(division: Division, *, units: int = 1, zero1: bool = False, with_costs: bool = False) -> Plan:
    """Returns the plan of a division; `units`: number of units that train together; `zero1`: they shard the state."""
    levels = division.levels
    position = {start: number for number, start in enumerate(_starts(division))}
    return Plan(
        tp=division.ranks,
        pp=division.pipeline_ranks,
        dp=units,
        zero1=zero1,
        axes=tuple(level.size for level in levels) if len(levels) > 1 else (),
        schedule=division.schedule,
        microbatches=division.microbatches,
        stages=tuple(position[start] for start in division.stages),
        recompute=tuple((position[start], position[stop]) for start, stop in division.recompute),
        calls=_calls(levels[0]),
        later_calls=tuple(map(_calls, levels[1:])),
        parameters=_tensors(division, lambda program: program.parameters),
        inputs=_tensors(division, lambda program: program.inputs),
        costs=division.costs() if with_costs and division.costs else None,
    )


def _starts(division: Division) -> list[int]:
    """Returns, for each global call, the index in the emitted program of the first call that it needs."""
    starts = list(range(len(division.whole.calls) + 1))
    for level in division.levels[:-1]:
        inside = local_program(level).starts
        starts = [inside[start] for start in starts]
    return starts


def _calls(division: Division) -> tuple[CallPlan, ...]:
    return tuple(CallPlan(*_name_and_module(call), division.strategies[call].name) for call in division.program.calls)


def _name_and_module(call: Call) -> tuple[str, str]:
    return call.name, call.module


def _tensors(division: Division, leaves: Callable[[Program], Sequence[Value]]) -> dict[str, TensorPlan]:
    """Returns the types, on all axes, of leaves of the global program."""
    plans = {}
    for value, last in zip(leaves(division.whole), leaves(division.program), strict=True):
        first, *later = map(str, (*last.outer, division.types[last]))
        plans[value.path] = TensorPlan(tuple(value.shape), _dtype(value), first, tuple(later))
    return plans


def _dtype(value: Value) -> str:
    return str(value.dtype).removeprefix("torch.")


def apply_plan(plan: Plan, graph: IRGraph) -> IRGraph:
    """Constrains a graph to the decisions of a plan.

    Raises:
        PlanError: the plan was made for another model, other shapes or another cluster; names the difference.
    """
    program, config = graph.program, graph.config
    plan.check(
        unit=config.plan_ngpus,
        units=config.units,
        calls=[(call.name, call.module) for call in program.calls],
        parameters={value.path: (value.shape, _dtype(value)) for value in program.parameters},
        inputs={value.path: (value.shape, _dtype(value)) for value in program.inputs},
    )
    operations = graph.operations
    graph.later.decide_each(plan.axes[1:], [partial(_decide_later, plan, n) for n in range(len(plan.later_calls))])
    if plan.pp > 1:
        config.apply_pipeline_scheduler(graph, len(plan.stages), plan.microbatches, plan.schedule)
        graph.pipeline_ranks = plan.pp
    if len(plan.stages) > 1:
        graph.staging([operations[start] for start in plan.stages])
    for first, last in plan.recompute:
        graph.recompute(operations[first:last])
    _decide(graph, plan.calls)
    for value in program.parameters:
        graph.constraints.types[value] = (_type((plan.parameters or {})[value.path].type, value.path),)
    return graph


def _decide(graph: IRGraph, calls: Sequence[CallPlan]) -> None:
    for node, call in zip(graph.operations, calls, strict=True):
        names = [strategy.name for strategy in graph.strategies(node)]
        if call.strategy not in names:
            raise PlanError(
                f"the plan's strategy {call.strategy!r} of {node!r} does not exist; there are {', '.join(names)}"
            )
        graph.constraints.strategies.setdefault(node.call, []).append(_is_called(call.strategy))


def _decide_later(plan: Plan, number: int, graph: IRGraph, local: LocalProgram) -> None:
    """Constrains the graph of the local program of a rank of axis `number` to the decisions of a plan.

    Raises:
        PlanError: the local program differs from that of the plan.
    """
    here = [_name_and_module(call) for call in local.program.calls]
    calls = plan.later_calls[number]
    if here != [(call.function, call.module) for call in calls]:
        raise PlanError(
            f"the plan lists {len(calls)} calls over axis {number + 2}, but dividing by the axis before gives "
            f"{len(here)} calls, or different ones: the plan was edited, or made by another version"
        )
    _decide(graph, calls)
    for value in graph.program.parameters:
        graph.constraints.types[value] = (_type((plan.parameters or {})[value.path].later[number], value.path),)


def _is_called(name: str) -> Callable[[Strategy], bool]:
    return lambda strategy: strategy.name == name


def _type(text: str, path: str) -> SpmdType:
    """Parses a parameter's type.

    Raises:
        PlanError: the text is no type that a parameter can have.
    """
    shard = re.fullmatch(r"S\((\d+)(?:, stride=(\d+))?\)(?: on rank (\d+))?", text)
    if shard and shard[3]:
        return WholeOnRank(int(shard[1]), rank=int(shard[3]))
    if shard:
        return S(int(shard[1]), stride=int(shard[2] or 1))
    if text not in ("I", "R"):
        raise PlanError(
            f"{path} has the unknown type {text!r} in the plan; parameters are I, S(dim), S(dim, stride=k) or "
            "S(0) on rank k"
        )
    return I if text == "I" else R

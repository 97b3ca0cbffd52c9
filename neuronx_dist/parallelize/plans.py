"""A division as a `Plan`, which is a file, and a plan as constraints on the choice."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ..planning.plan import CallPlan, Plan, PlanError, TensorPlan
from ..spmd.types import I, R, S, SpmdType
from .graph import IRGraph
from .program import Division, Strategy, Value

__all__ = ["apply_plan", "plan_of"]


def plan_of(division: Division, *, units: int = 1) -> Plan:
    """The plan of a division; `units`: how many units of ranks train together."""
    program = division.program
    ranks = division.pipeline_ranks
    return Plan(
        tp=division.size,
        pp=ranks,
        dp=units,
        schedule=division.schedule,
        microbatches=division.microbatches,
        stages=tuple(division.stages),
        recompute=tuple(division.recompute),
        calls=tuple(CallPlan(call.name, call.module, division.strategies[call].name) for call in program.calls),
        parameters=_tensors(division, program.parameters),
        inputs=_tensors(division, program.inputs),
    )


def _tensors(division: Division, values: Sequence[Value]) -> dict[str, TensorPlan]:
    return {value.path: TensorPlan(tuple(value.shape), _dtype(value), str(division.types[value])) for value in values}


def _dtype(value: Value) -> str:
    return str(value.dtype).removeprefix("torch.")


def apply_plan(plan: Plan, graph: IRGraph) -> IRGraph:
    """Decides everything as a plan says.

    Raises:
        PlanError: the plan was made for another model, other shapes or another cluster; with what differs.
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
    if plan.pp > 1:
        config.apply_pipeline_scheduler(graph, len(plan.stages), plan.microbatches, plan.schedule)
        graph.pipeline_ranks = plan.pp
    if len(plan.stages) > 1:
        graph.staging([operations[start] for start in plan.stages])
    for first, last in plan.recompute:
        graph.recompute(operations[first:last])
    for node, call in zip(operations, plan.calls, strict=True):
        names = [strategy.name for strategy in graph.strategies(node)]
        if call.strategy not in names:
            raise PlanError(f"{node!r} has no strategy {call.strategy!r} as in the plan; it has {', '.join(names)}")
        graph.constraints.strategies.setdefault(node.call, []).append(_is_called(call.strategy))
    for value in program.parameters:
        graph.constraints.types[value] = (_type((plan.parameters or {})[value.path].type, value.path),)
    return graph


def _is_called(name: str) -> Callable[[Strategy], bool]:
    return lambda strategy: strategy.name == name


def _type(text: str, path: str) -> SpmdType:
    """A type from its text.

    Raises:
        PlanError: it is none that a parameter can have.
    """
    shard = re.fullmatch(r"S\((\d+)(?:, stride=(\d+))?\)", text)
    if shard:
        return S(int(shard[1]), stride=int(shard[2] or 1))
    if text not in ("I", "R"):
        raise PlanError(
            f"{path} has the unknown type {text!r} in the plan; parameters are I, S(dim) or S(dim, stride=k)"
        )
    return I if text == "I" else R

"""A smaller module in the place of one that is too large to run: divided as the large one is, emitted in the same way.

A call of the smaller program stands for the call of the large one that the same line of the same submodule makes: it
gets the strategy of the same types, so that the layers of both are divided in the same way, whatever a policy would
choose at the smaller sizes. Lines of the large source that are like no line of the smaller one are listed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...planning.plan import PlanError
from ...program.program import Call, Division, Program, Strategy, operands_of
from ...spmd.types import S, Shard, SpmdType
from ..choose.conversions import WholeOnRank
from ..choose.strategies import strides_of
from ..config import ComputeConfig, Pipeline
from ..emit.emitted_class import EmittedProgram, emitted_program
from ..example import Example
from ..policy.graph import IRGraph
from ..policy.plans import plan_of
from ..policy.policies import costs_of
from .verify import too_large

__all__ = ["lines_not_compared", "smaller_program"]


def smaller_program(divisions: Sequence[Division], example: Example, config: ComputeConfig) -> EmittedProgram:
    """Records a smaller module in the modes of a large one, and divides and emits it as the large one is.

    Args:
        divisions: those of the large module.

    Raises:
        ValueError: the smaller module is too large too, or its forward fails on its arguments.
        PlanError: it cannot be divided so at its sizes; the message names the operation or parameter.
    """
    smaller = []
    for division in divisions:
        program = example.program(training=division.whole.training)
        reason = too_large(program)
        if reason:
            raise ValueError(
                f"verify_with, called with the arguments of {example.origin}, is too large to compare values: {reason}"
            )
        try:
            smaller.append(_divided_like(division, program, config))
        except PlanError as error:
            raise PlanError(
                f"verify_with cannot be divided in the same way as the large {example.name}: {error}. Choose sizes "
                "with the same divisibility by the number of ranks"
            ) from error
    return emitted_program(example, smaller)


def _divided_like(division: Division, program: Program, config: ComputeConfig) -> Division:
    """Divides a smaller program over the axes and stages of a division, by its strategies."""
    graph = IRGraph(program, config, costs=costs_of(config))
    graph.pipeline_ranks = division.pipeline_ranks
    if len(division.stages) > 1:  # cut anew: the smaller program has less layers
        graph.pipeline = Pipeline(len(division.stages), division.microbatches, division.schedule)
    graph.over_axes_of(division, _decide_like)
    spans = [range(start, stop) for start, stop in plan_of(division).recompute]
    recomputed = {
        place: any(number in span for span in spans) for number, place in enumerate(_places(division.whole.calls))
    }
    for node, place in zip(graph.operations, _places(program.calls)):
        node.recompute = recomputed.get(place, node.recompute)
    return graph.divide()


def _decide_like(division: Division, graph: IRGraph) -> None:
    """Decides the strategies and the types of parameters of a division in the graph of a smaller program.

    Raises:
        PlanError: an operation has no such strategy.
    """
    counterparts = dict(zip(_places(division.program.calls), division.program.calls))
    for node, place in zip(graph.operations, _places(graph.program.calls)):
        if place not in counterparts:
            continue
        wanted = division.strategies[counterparts[place]]
        strategies = graph.strategies(node)
        same = [
            strategy
            for strategy in strategies
            if (strategy.operands, strategy.results) == (wanted.operands, wanted.results)
        ]
        same = same or [strategy for strategy in strategies if _form(strategy) == _form(wanted)]
        if not same:
            raise PlanError(
                f"{node.call!r} on {', '.join(map(repr, operands_of(node.call)))} has no strategy {wanted.name!r} over "
                f"{graph.size} ranks; it has {', '.join(strategy.name for strategy in strategies)}"
            )
        graph.constraints.strategies.setdefault(node.call, []).append(_one_of(same))
    types = {value.path: division.types[value] for value in division.program.parameters}
    strides = (1, *strides_of(graph.program))
    for value in graph.program.parameters:
        if value.path in types:
            graph.constraints.types[value] = _types_like(types[value.path], strides, graph.size)


def _places(calls: Sequence[Call]) -> Iterator[tuple[Any, ...]]:
    """Yields for each call its submodule, line and function, and the number of such calls before it."""
    count: Counter[tuple[str, ...]] = Counter()
    for call in calls:
        place = call.module, call.where, call.name
        yield *place, count[place]
        count[place] += 1


def _one_of(strategies: Sequence[Strategy]) -> Callable[[Strategy], bool]:
    names = {strategy.name for strategy in strategies}
    return lambda strategy: strategy.name in names


def _form(strategy: Strategy) -> tuple[Any, ...]:
    """The types of a strategy without the strides of shards, which may count positions of other dims."""
    types = [
        (type_.letter, type_.dim if isinstance(type_, Shard) else None)
        for type_ in (*strategy.operands, *strategy.results)
    ]
    return strategy.local.function, len(strategy.operands), *types


def _types_like(spmd_type: SpmdType, strides: Sequence[int], size: int) -> tuple[SpmdType, ...]:
    """Returns the types of a smaller parameter: the same one, or shards of all its strides if it lacks this stride.

    A whole table may be on any of the `size` ranks: sizes decide about it.
    """
    if isinstance(spmd_type, WholeOnRank):
        return tuple(WholeOnRank(spmd_type.dim, rank=rank) for rank in range(size))
    if not isinstance(spmd_type, Shard) or spmd_type.stride in strides:
        return (spmd_type,)
    return tuple(S(spmd_type.dim, stride=stride) for stride in strides)


# --- lines ------------------------------------------------------------------------------------------------------------


def lines_not_compared(source: str, smaller: str) -> list[str]:
    """Returns the lines of an emitted source that are like no line of a smaller one, the first of each kind.

    Lines are equal if they make the same calls, with results of the same types; names of values, weights and numbers
    (sizes, counts, scales) may differ.
    """
    known = {form for form, _ in _forms(smaller)}
    lines: dict[str, str] = {}
    for form, line in _forms(source):
        if form not in known:
            lines.setdefault(form, line)
    return list(lines.values())


def _forms(source: str) -> Iterator[tuple[str, str]]:
    """Yields the lines that compute a value, with their forms: lines without names, weights and numbers."""
    computing = [line.strip() for line in source.splitlines() if _ASSIGNMENT.match(line)]
    assigned = {name for names in _ASSIGNED.findall(source) for name in _NAME.findall(names)}
    arguments = {name for heads in _HEAD.findall(source) for name in _NAME.findall(heads)}
    for line in computing:
        form = _NUMBER.sub("0", _WEIGHT.sub("self", _SHAPE.sub("", line)))
        yield _NAME.sub(lambda match: "_" if match[0] in assigned | arguments else match[0], form), line


_ASSIGNMENT = re.compile(r" {8,}[a-z_][\w, ]* = (?!self\._\w+\()\S.*  # \[")  # no call of an emitted method
_ASSIGNED = re.compile(r"^ {8,}([\w, ]+) = ", re.MULTILINE)
_HEAD = re.compile(r"^ +def \w+\((.*)\):$", re.MULTILINE)
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")
_SHAPE = re.compile(r"(?<=[#;] )\[(\d+( of \d+| on rank \d+)?(, )?)*\]")
_WEIGHT = re.compile(r"\b(self|layer)(\.\w+|\[[^\]]*\])+")
_NUMBER = re.compile(r"(?<![\w.])(?<!S\()\d+(\.\d+)?(e[+-]?\d+)?")

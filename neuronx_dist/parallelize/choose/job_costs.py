"""The seconds of a step and the bytes of a rank, of a whole job: units of one division, each on other samples.

    job      = units x pp stages x tp ranks, with or without ZeRO, m microbatches in each unit
    step     = the schedule, simulated with the seconds of each stage, + the longest update of a stage
    update   = gradients summed over the units (all_reduce, or reduce_scatter and all_gather: equal bytes) + optimizer
    bytes    = parameters, gradients, optimizer state (a shard under ZeRO) + microbatches in flight x saved tensors
               + the saved tensors of the largest recomputed block, which its backward computes again

A recomputed block (`blocks_of`) saves its inputs alone, and its forward runs again in backward.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf, prod
from typing import NamedTuple

from ...planner.simulation import Simulator
from ...planning.costs import Costs
from ...planning.recompute import least_time
from ...program.program import Call, Division, Program, Value, operands_of
from ...spmd.types import SpmdType
from .cost_tables import CostTables, Saved
from .exact import StrategyChoice
from .stages import StageCalls, schedule_of, stages_of

__all__ = ["SIMULATOR", "DividedUnit", "Job", "JobCosts", "Links", "Recomputed", "blocks_of", "staged"]

Span = tuple[int, int]
_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")
SIMULATOR = Simulator()


class Links(NamedTuple):
    """Speeds of the three axes of a job: inside a stage, between stages, between units."""

    tp: Costs
    pp: Costs
    dp: Costs


class Job(NamedTuple):
    """A way to use the ranks of a job: `units` of `pp` stages of `tp` ranks.

    Attributes:
        zero1: units shard the optimizer's state.
        microbatches: of a unit, in a step.
        trains: False: the job only runs forwards.
        axes: numbers of a stage's ranks along its axes, outermost first; (): one axis.
        batch: the batch is cut over the first of several axes.
    """

    units: int
    pp: int
    tp: int
    zero1: bool
    microbatches: int
    trains: bool = True
    axes: tuple[int, ...] = ()
    batch: bool = False

    @property
    def samples(self) -> int:
        """Number of examples in a step."""
        return self.units * self.microbatches

    @property
    def least_passes(self) -> float:
        """Number of microbatches that one rank of a stage could compute in the time of a step, at least.

        Before the first task of a stage, and after its last one, a microbatch passes through all stages before it: a
        step of T seconds has stages of at most T/m, (T - T/m)/m, ... seconds, all together T (1 - (1 - 1/m)^pp).
        """
        return 1 / (1 - (1 - 1 / self.microbatches) ** self.pp)

    def update_seconds(self, value: Value, links: Links) -> float:
        """Returns the seconds in which one rank sums the gradient of a whole parameter over the units and updates it.

        Read weight, gradient and state, and write weight and state; beside sums, copy gradients into buckets and back.
        """
        if value.kind != "parameter" or not (value.requires_grad and self.trains):
            return 0.0
        moved = 3 * value.nbytes + 2 * links.dp.optimizer_bytes * prod(value.shape)
        seconds = moved / links.dp.bandwidth / (self.units if self.zero1 else 1)
        if self.units > 1:
            seconds += 2 * (1 - 1 / self.units) * value.nbytes / links.dp.link_bandwidth
            seconds += 4 * value.nbytes / links.dp.bandwidth
        return seconds

    def state_bytes(self, value: Value, type_: SpmdType, tables: CostTables) -> float:
        """Returns the bytes of a parameter on a rank, with its gradient and the optimizer's state."""
        nbytes = tables.parameter_bytes(value, type_)
        if self.zero1 and value.requires_grad:
            sharded = tables.costs.optimizer_bytes * prod(value.shape)
            nbytes -= tables.local(sharded * (1 - 1 / self.units), type_)
        return nbytes

    def latency(self, links: Links) -> float:
        """Returns the seconds of the update of no parameter: one collective for each of its verbs."""
        return (2 if self.zero1 else 1) * links.dp.link_latency if self.units > 1 else 0.0

    def __str__(self) -> str:
        inside = [f"{name}={size}" for name, size in (("pp", self.pp), ("tp", self.tp)) if size > 1]
        axes = f" ({' x '.join(map(str, self.axes))}{', batch first' if self.batch else ''})" if self.axes else ""
        return f"{self.units} x {' '.join(inside) or 'one rank'}{axes}{' ZeRO' if self.zero1 else ''}"


class JobCosts(NamedTuple):
    """Costs of a job with one division.

    Attributes:
        seconds: of a step, of which `waiting` of the stage that computes longest, `update` after the last backward.
        again: seconds of a step that the longest stage spends on recomputation.
        peaks: bytes of a rank of each stage, of which `parameters` with gradients and optimizer state.
        recompute: spans of calls that are computed again.
    """

    seconds: float
    waiting: float
    update: float
    again: float
    peaks: list[float]
    parameters: list[float]
    recompute: list[Span]


class Recomputed(NamedTuple):
    """Costs of a recomputed block of a microbatch: bytes freed, seconds, and bytes while backward computes it again."""

    freed: float
    seconds: float
    inside: float


class _Stage(NamedTuple):
    forward: float
    total: float
    update: float
    state: float
    message: float


class DividedUnit:
    """A division of a unit into stages, and what its calls and tensors cost.

    Args:
        choice: the choice that made the division.
        division: with its stages; `spans`: what is recomputed in any case.
    """

    def __init__(self, choice: StrategyChoice, division: Division, spans: Sequence[Span] = ()) -> None:
        self.tables, self.division, self.spans = choice.tables, division, list(spans)
        self.program = division.program
        self.stages = stages_of(division)
        self._home = {call: number for number, call in enumerate(self.program.calls)}

    def costs(self, job: Job, links: Links, schedule: str, memory: float | None) -> JobCosts:
        """Returns the costs of a job, with the least recomputation that fits the memory, if there is any.

        Raises:
            ValueError: the schedule does not go with the job.
        """
        order = schedule_of(job.pp, job.pp, job.microbatches, schedule)
        seconds, again, peaks, state, recompute = [], [], [], [], list(self.spans)
        parts = [self._stage(number, job, links) for number in range(job.pp)]
        for number, (calls, part) in enumerate(zip(self.stages, parts, strict=True)):
            in_flight = order.peak_in_flight(number) if self.program.training else 0
            spans, saved = self._recomputed(calls, memory, part.state, in_flight)
            recompute += [span for span in spans if span not in recompute]
            again.append(sum(self._seconds(self.program.calls[slice(*span)]) for span in spans))
            peaks.append(part.state + saved)
            state.append(part.state)
            seconds.append([(part.forward, part.total - part.forward + again[-1], 0.0)])
        step = SIMULATOR.step_time(order, seconds, max(part.message for part in parts))
        update = max(part.update for part in parts)
        longest = max(range(job.pp), key=lambda number: sum(seconds[number][0]))
        waiting = step - job.microbatches * sum(seconds[longest][0])
        return JobCosts(
            step + update, waiting, update, job.microbatches * again[longest], peaks, state, sorted(recompute)
        )

    def _stage(self, number: int, job: Job, links: Links) -> _Stage:
        calls, _, sent = self.stages[number]
        tables, division = self.tables, self.division
        total = sum(tables.times(division.strategies, division.type_of, calls))
        if number == len(self.stages) - 1:
            outputs = dict.fromkeys(x for x in self.program.outputs if isinstance(x, Value) and x.producer is not None)
            total += sum(tables.output_conversion(x, tables.number(division.type_of(x)))[0] for x in outputs)
        update = state = 0.0
        for value in dict.fromkeys(x for call in calls for x in operands_of(call) if x.kind == "parameter"):
            type_ = division.types[value]
            update += tables.local(job.update_seconds(value, links), type_)
            state += job.state_bytes(value, type_, tables)
        message = sum(tables.local(value.nbytes, division.type_of(value)) for value in sent)
        forward = self._seconds(calls) if self.program.training else total
        return _Stage(forward, total, update and update + job.latency(links), state, links.pp.communicate(message, 1))

    def _seconds(self, calls: Sequence[Call]) -> float:
        """Returns the seconds of a forward of some calls."""
        return sum(self.tables.forward.times(self.division.strategies, self.division.type_of, calls))

    # Memory.

    def _recomputed(
        self, stage: StageCalls, memory: float | None, state: float, in_flight: int
    ) -> tuple[list[Span], float]:
        """Returns the recomputed spans of a stage, and the bytes that it saves with them.

        Blocks are recomputed until the stage fits the memory, those that take the least time for it; all of them, if
        the stage does not fit.
        """
        numbers = {self._home[call] for call in stage.calls}
        always = [span for span in self.spans if span[0] in numbers]

        def bytes_with(spans: Collection[Span]) -> tuple[float, float]:
            outside, inside = self._saved(stage.calls, [*always, *spans])
            return in_flight * outside, in_flight * outside + inside

        plain, peak = bytes_with(())
        if memory is None or state + peak <= memory or not in_flight:
            return always, peak
        options = self.recomputable(stage.calls, always)
        best: tuple[float, list[Span], float] | None = None
        smallest = peak, list[Span]()
        for limit in sorted({row.inside for row in options.values()}):
            spans = [block for block, row in options.items() if row.inside <= limit]
            allowed = {str(block): (int(in_flight * options[block].freed), options[block].seconds) for block in spans}
            smallest = min(smallest, (bytes_with(spans)[1], spans), key=lambda pair: pair[0])
            tables = {name: [(0, 0.0, ()), (freed, more, ("full",))] for name, (freed, more) in allowed.items()}
            need = 1 + int(state + plain + limit - memory)
            while need <= sum(freed for freed, _ in allowed.values()):
                names = {name for name, _ in least_time(tables, need)}
                spans = [block for block in options if str(block) in names]
                peak = bytes_with(spans)[1]
                if state + peak <= memory:
                    seconds = sum(options[block].seconds for block in spans)
                    best = min(best or (inf, [], 0.0), (seconds, spans, peak), key=lambda found: found[0])
                    break
                need += 1 + int(state + peak - memory)
        peak, spans = (best[2], best[1]) if best else smallest
        return [*always, *spans], peak

    def recomputable(self, calls: Sequence[Call], always: Sequence[Span] = ()) -> dict[Span, Recomputed]:
        """Returns the blocks among the calls of a stage, and the costs of each, beside the spans `always`."""
        numbers = {self._home[call] for call in calls}
        taken = {number for span in always for number in range(*span)}
        plain, _ = self._saved(calls, always)
        options = {}
        for block in blocks_of(self.program):
            if numbers.issuperset(range(*block)) and taken.isdisjoint(range(*block)):
                outside, inside = self._saved(calls, [*always, block])
                if plain > outside:
                    seconds = self._seconds(self.program.calls[slice(*block)])
                    options[block] = Recomputed(plain - outside, seconds, inside)
        return options

    def _saved(self, calls: Sequence[Call], spans: Sequence[Span]) -> tuple[float, float]:
        """Returns the bytes that a microbatch saves, and those of the span that has most while it is computed again."""
        division, tables = self.division, self.tables
        span_of = {call: span for span in spans for call in self.program.calls[slice(*span)]}
        outside: dict[Saved, float] = {}
        inside: dict[Span, dict[Saved, float]] = {}
        for call in calls:
            span = span_of.get(call)
            (outside if span is None else inside.setdefault(span, {})).update(
                tables.saved_of(call, division.strategies[call], division.types)
            )
            for value in operands_of(call) if span is not None else ():
                if value.producer is not None and span_of.get(value.producer) != span:
                    type_ = division.type_of(value)
                    outside[value, type_] = tables.local(value.nbytes, type_)
        again = (sum(tensors[key] for key in tensors.keys() - outside.keys()) for tensors in inside.values())
        return sum(outside.values()), max(again, default=0.0)


def blocks_of(program: Program) -> list[Span]:
    """Returns the (first, end) calls of each block: of each module in a list, such as `model.layers.3`.

    A module in a list that is inside another such module is a part of its block.
    """
    return list(_blocks(program))


def _blocks(program: Program) -> Iterator[Span]:
    names = [found[0] if (found := _BLOCK.match(call.module)) else "" for call in program.calls]
    for name, group in groupby(range(len(names)), names.__getitem__):
        numbers = list(group)
        if name:
            yield numbers[0], numbers[-1] + 1


def staged(division: Division, stages: Sequence[int], job: Job, schedule: str) -> Division:
    """Returns the division of a unit as a pipeline of the job."""
    return replace(
        division,
        stages=list(stages),
        microbatches=job.microbatches if job.pp > 1 else 1,
        schedule=schedule,
        pipeline_ranks=job.pp,
        zero1=job.zero1,
    )

"""The whole job of `autodist` without `plan_ngpus`: units, pipeline stages, ZeRO, recomputation, division, by one cost.

    for each number of tp ranks        the exact search of `choose/exact.py`, whose cost has the update of parameters;
                                       with `explore_axes` over two axes too, one after the other
    for each job with these ranks      stages, recomputation, and the seconds and bytes of `choose/job_costs.py`
    chosen                             the least seconds per sample among the jobs that fit the memory of a rank

Jobs are compared in the order of a lower bound of their seconds; those whose bound is above the best are not divided.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise, product
from math import inf
from typing import Any, NamedTuple

from ...planner.cluster import Cluster
from ...planner.presets import PRESETS
from ...planning.costs import Costs
from ...planning.layout import format_bytes
from ...planning.plan import PlanError
from ...program.program import Division, Program, operands_of
from ...spmd.types import S
from ..choose.cuts import balanced
from ..choose.exact import StrategyChoice
from ..choose.job_costs import DividedUnit, Job, JobCosts, Links, staged
from ..choose.plan_costs import plan_costs
from ..choose.step_cuts import StepCuts
from ..choose.whole_tables import places_of
from ..config import ComputeConfig, schedule_named
from .graph import IRGraph
from .later_axes import axes_wanted

__all__ = ["JobChoice", "link_of", "memory_of"]

MARGIN = 0.95  # of a device's memory, as in the planner
STEPS = 12  # prices of memory, each 16 times the last one
REFINED = 4  # bisections between the last two


def link_of(costs: Costs | Cluster, program: Program, size: int, stride: int = 1) -> Costs:
    """Returns the speeds of `size` ranks that are `stride` apart: of a cluster by the link that joins them."""
    if isinstance(costs, Costs):
        return costs
    dtypes = Counter({"float32": 0})
    for value in program.parameters:
        dtypes[str(value.dtype).removeprefix("torch.")] += value.nbytes
    return costs.costs(size, stride, dtype=dtypes.most_common(1)[0][0])


def memory_of(config: ComputeConfig) -> float | None:
    """Returns the bytes that a rank may hold: `mem_constraint`, else 95 % of the device of the costs; None: unknown."""
    limit, costs = config.pas_config.get("mem_constraint"), config.pas_config.get("costs", "h100")
    if limit:
        return float(limit * 10**9)
    if isinstance(costs, Cluster):
        return MARGIN * costs.memory
    return MARGIN * PRESETS[costs].memory if isinstance(costs, str) else None


class _Solved(NamedTuple):
    """A division of a stage's ranks at a price of memory.

    Attributes:
        choice: that of the last axis.
        starts: first call of the division that each call of the program needs.
        least: seconds of a microbatch that no division of one axis is below; 0: unknown.
    """

    division: Division
    choice: StrategyChoice
    starts: list[int]
    least: float


class _Found(NamedTuple):
    job: Job
    division: Division
    choice: StrategyChoice
    costs: JobCosts
    price: float

    @property
    def per_sample(self) -> float:
        return self.costs.seconds / self.job.samples


@dataclass
class _Row:
    """A job in the comparison: a lower bound of its seconds per sample, and what is known beside it.

    Attributes:
        needs: bytes of the smallest division found; `may_fit`: False: no division of the job fits the memory.
    """

    job: Job
    bound: float
    found: _Found | None = None
    why: str = ""
    needs: float = inf
    may_fit: bool = True


@dataclass
class JobChoice:
    """The choice of a job of `config.world_size` ranks.

    Attributes:
        graph_of: makes the graph of a program on axes of these sizes of a stage, with the options of the policy; True:
            with the batch cut over the first axis.
        memory: bytes that a rank may hold; None: any number.
    """

    program: Program
    config: ComputeConfig
    costs: Costs | Cluster
    graph_of: Callable[[tuple[int, ...], bool], IRGraph]
    memory: float | None
    _graphs: dict[Any, tuple[IRGraph, StrategyChoice, float]] = field(default_factory=dict)
    _solved: dict[Any, _Solved] = field(default_factory=dict)

    def division(self) -> Division:
        """Returns the division of the fastest job, whose costs have the comparison.

        Raises:
            PlanError: no job fits the memory, or the options allow none; says by how much, and what would fit.
        """
        rows = sorted(self.rows(), key=lambda row: (len(row.job.axes), row.bound))  # one axis first: its bound is exact
        best: _Found | None = None
        for row in rows:
            if best is not None and row.bound >= best.per_sample:
                row.why = "its lower bound is above the best"
                continue
            try:
                self.compare(row, best.per_sample if best else inf)
            except ValueError as error:  # of the cut into stages
                row.why = str(error)
            if row.found and (best is None or row.found.per_sample < best.per_sample):
                best = row.found
        if best is None:
            raise self._nothing_fits(rows)
        best.choice.count_updates(self._update(best.job))
        best.choice.solve(0.0)
        best.choice.price = best.price
        best.division.costs = partial(self._costs, best, rows)
        best.division.recompute = best.costs.recompute
        return best.division

    def rows(self) -> list[_Row]:
        """Returns the jobs that the options allow, with lower bounds of their seconds.

        Raises:
            PlanError: there are none.
        """
        jobs = list(self._jobs())
        if not jobs:
            names = "pipeline_nstages", "step_samples", "explore_axes"
            options = {name: self.config.pas_config.get(name) for name in names}
            asked = ", ".join(f"{name}={value}" for name, value in options.items() if value)
            raise PlanError(
                f"autodist: no job of {self.config.world_size} ranks goes with {asked}: units times stages times tp "
                f"ranks must be {self.config.world_size}, and units must divide step_samples"
            )
        rows = []
        for job in jobs:
            links = self.links(job)
            update = sum(job.update_seconds(value, links) for value in self.program.parameters)
            try:
                least = self._least(job)
            except PlanError:  # the search is too large, or the options contradict: `division` says which
                least = 0.0
            rows.append(_Row(job, self._bound(job, least, update)))
        return rows

    def _least(self, job: Job) -> float:
        """Returns seconds of a microbatch that no division of a job is below; 0: unknown.

        Later axes divide all seconds of a division over the first one but those of empty calls, at best.
        """
        if not job.axes:
            return self.divided_over(job)[2]
        _, choice, least = self.divided_over(job._replace(tp=job.axes[0], axes=(), batch=False))
        calls = [call for call, options in choice.options.items() if not any(option.steps for option in options)]
        backward = [call.grad and any(x.requires_grad for x in call.results) for call in calls]
        launches = len(calls) + (sum(backward) if self.program.training else 0)
        empty = min(least, launches * choice.costs.launch)
        return empty + (least - empty) * job.axes[0] / job.tp

    def _least_bytes(self, job: Job) -> float:
        """Returns bytes of the largest stage that no division of a job is below: of parameters, cut anywhere."""
        tables = self.divided_over(job._replace(axes=(), batch=False))[1].tables
        bytes_of = {
            value: min(job.state_bytes(value, type_, tables) for type_ in ((S(0),) if job.axes else types))
            for value, types in tables.types.items()
            if value.kind == "parameter"
        }
        first = [sum(bytes_of.pop(value, 0.0) for value in operands_of(call)) for call in self.program.calls]
        starts = balanced(first, [0.0] * len(first), min(job.pp, len(first)))
        return max(sum(first[start:end]) for start, end in pairwise([*starts, len(first)]))

    def _jobs(self) -> Iterator[Job]:
        options, ranks = self.config.pas_config, self.config.world_size
        most, stages = options.get("max_partition_degree") or ranks, options.get("pipeline_nstages", "auto")
        pipelines = self.config.use_end2end and not self.config.inference_only and options.get("explore_pipeline", True)
        zero1 = [False, True] if self.config.use_zero is None else [self.config.use_zero]
        for tp in (d for d in range(1, min(most, ranks) + 1) if ranks % d == 0):
            for pp in (d for d in range(1, ranks // tp + 1) if ranks // tp % d == 0):
                units = ranks // tp // pp
                count = self._microbatches(units)
                allowed = pp == stages if stages not in ("auto", None) else pp == 1 or pipelines
                if allowed and count:
                    trains = not self.config.inference_only
                    every = axes_wanted(options.get("explore_axes"), tp)
                    for axes, one in product(every, zero1 if units > 1 and trains else [False]):
                        job = Job(units, pp, tp, one, count, trains, axes if len(axes) > 1 else ())
                        yield from (job, job._replace(batch=True))[: len(axes)]

    def _microbatches(self, units: int) -> int:
        """Returns the number of microbatches of a unit; 0: the samples of a step cannot be divided into units."""
        options = self.config.pas_config
        total, frequency = options.get("step_samples"), options.get("update_freq") or 1
        if total:
            return 0 if total % units else int(total // units)
        number = options.get("pipeline_nmicros")
        return int(number or (frequency[0] if isinstance(frequency, (list, tuple)) else frequency))

    def _bound(self, job: Job, seconds: float, update: float) -> float:
        """Returns seconds per sample that no division of a job is below.

        Args:
            seconds: the least of a microbatch; `update`: of the parameters on all ranks of a unit.
        """
        links = self.links(job)
        latency = job.latency(links) if any(job.update_seconds(x, links) for x in self.program.parameters) else 0.0
        return (job.least_passes * seconds + update / job.tp / job.pp + latency) / job.samples

    def links(self, job: Job) -> Links:
        """Returns the speeds of the three axes of a job."""
        axes = (job.tp, 1), (job.pp, job.tp), (job.units, job.tp * job.pp)
        return Links(*(link_of(self.costs, self.program, size, stride) for size, stride in axes))

    def _update(self, job: Job) -> Callable[[Any], float] | None:
        """Returns the seconds of updating a whole parameter, as a part of one microbatch's."""
        links, passes = self.links(job), job.least_passes * job.pp
        return lambda value: job.update_seconds(value, links) / passes

    def divided_over(self, job: Job) -> tuple[IRGraph, StrategyChoice, float]:
        """Returns the graph of a stage's ranks, the choice over its first axis, and the least seconds of this axis.

        Seconds are of a microbatch (0: unknown). With several stages no embedding table is whole on a rank, as a cut
        into stages may come between its calls.
        """
        axes = job.axes or (job.tp,)
        key = axes, job.batch, job.pp > 1 and bool(places_of(self.program, axes[0]))
        if key not in self._graphs:
            graph = self.graph_of(axes, job.batch)
            graph.is_cut_later = key[-1]
            choice = graph.problem()
            choice.solve(0.0)
            self._graphs[key] = graph, choice, choice.least() or 0.0
        return self._graphs[key]

    def _solve(self, job: Job, price: float) -> _Solved:
        """Returns the best division at a price of memory, with a bound if the price is 0 and there is one axis."""
        graph, first, _ = self.divided_over(job)

        def solved(_: IRGraph, choice: StrategyChoice) -> Division:
            choice.count_updates(self._update(job))
            return choice.solve(price).division

        key = job, price, first.tables  # a search that became too large has other strategies
        if key not in self._solved:
            division, choice, starts = graph.over_all_axes(first, solved)
            least = 0.0 if price or job.axes else choice.least() or 0.0
            self._solved[job, price, first.tables] = _Solved(division, choice, starts, least)
        return self._solved[job, price, first.tables]

    def compare(self, row: _Row, best: float) -> None:
        """Divides a job at rising prices of memory, until it fits without recomputation; the fastest counts."""
        job = row.job
        if self.memory is not None and (least := self._least_bytes(job)) > self.memory:
            row.may_fit, row.why = False, f"its parameters need at least {_shown_bytes(least)} on a rank"
            return
        solved = self._solve(job, 0.0)
        row.bound = max(row.bound, self._bound(job, solved.least, 0.0))
        if row.bound >= best:
            row.why = "its lower bound is above the best"
            return
        if self._try(row, solved, 0.0) or job.tp == 1:  # one rank has one division
            row.may_fit = row.found is not None or job.pp > 1
            return
        self._smallest(row)
        if self.memory is None or row.needs > self.memory:
            return
        low = high = 0.0
        for price in self._prices:
            low, high = high, price
            if self._try(row, self._solve(job, high), high):
                break
        for _ in range(REFINED if low else 0):
            middle = (low * high) ** 0.5
            if self._try(row, self._solve(job, middle), middle):
                high = middle
            else:
                low = middle

    @cached_property
    def _prices(self) -> list[float]:
        start = 1e-3 / max(sum(value.nbytes for value in self.program.parameters), 1.0)  # a millisecond for all of them
        return [start * 16.0**step for step in range(STEPS)]

    def _smallest(self, row: _Row) -> None:
        """Divides a job so that a rank needs the least bytes."""
        self._try(row, self._solve(row.job, self._prices[-1]), self._prices[-1])

    def _try(self, row: _Row, solved: _Solved, price: float) -> bool:
        """Counts a division of a job, if it fits; returns whether it does so without additional recomputation."""
        job, (division, choice, starts_of, _) = row.job, solved
        graph, _, _ = self.divided_over(job)
        spans = [(starts_of[first], starts_of[end]) for first, end in graph.recomputed]
        schedule = schedule_named(self.config.pas_config.get("pipeline_scheduler", "1f1b")) if job.pp > 1 else "1f1b"
        cuts = [[0]]
        if job.pp > 1:
            allowed = graph.starts_allowed
            if allowed is not None or job.axes:
                allowed = {starts_of[number] for number in allowed or range(len(starts_of) - 1)}
            cuts = StepCuts(choice, division, job, self.links(job), schedule, allowed, self.memory, spans).best()
        without = False
        for starts in cuts:
            pipeline = staged(division, starts, job, schedule)
            costs = DividedUnit(choice, pipeline, spans).costs(job, self.links(job), schedule, self.memory)
            row.needs = min(row.needs, max(costs.peaks))
            if self.memory is not None and max(costs.peaks) > self.memory:
                if row.found is None:
                    row.why = f"needs at least {_shown_bytes(row.needs)} on a rank"
                continue
            found = _Found(job, pipeline, choice, costs, price)
            if row.found is None or found.per_sample < row.found.per_sample:
                row.found, row.why = found, ""
            without |= len(costs.recompute) == len(spans)
        return without

    def _nothing_fits(self, rows: list[_Row]) -> PlanError:
        ranks = self.config.world_size
        for row in rows:
            if row.needs == inf and not row.may_fit:
                with suppress(ValueError):
                    self._smallest(row)
        least = min(rows, key=lambda row: row.needs)
        if self.memory is None or least.needs == inf:
            return PlanError("\n  - ".join(["autodist found no job:", *(f"{row.job}: {row.why}" for row in rows)]))
        more = next((n for n in (2 * ranks, 4 * ranks, 8 * ranks) if self._fits(n)), 0)
        return PlanError(
            f"autodist: no job of {ranks} ranks fits {_shown_bytes(self.memory)} on a rank: the smallest, {least.job}, "
            f"needs {_shown_bytes(least.needs)} with its blocks recomputed, {_shown_bytes(least.needs - self.memory)} "
            f"too many: use {f'{more} ranks' if more else 'a smaller example'}, or pas_config mem_constraint="
            f"{least.needs / 1e9:.4g}"
        )

    def _fits(self, ranks: int) -> bool:
        """Returns whether a job of this many ranks fits the memory."""
        choice = replace(self, config=replace(self.config, runtime_ngpus=ranks), _graphs=self._graphs, _solved={})
        with suppress(ValueError):
            for row in choice.rows():
                with suppress(ValueError):
                    choice._smallest(row)
                    if row.found:
                        return True
        return False

    def _costs(self, best: _Found, rows: list[_Row]) -> dict[str, Any]:
        costs, bound = best.costs, min([best.per_sample, *(row.bound for row in rows if row.may_fit)])
        return {
            **plan_costs(best.choice, best.division),
            "job": {
                "chosen": str(best.job),
                "units": best.job.units,
                "zero1": best.job.zero1,
                "samples": best.job.samples,
                "microbatches": best.job.microbatches,
                "seconds": costs.seconds,
                "waiting_seconds": costs.waiting,
                "update_seconds": costs.update,
                "recomputing_seconds": costs.again,
                "seconds_per_sample": best.per_sample,
                "peak_bytes": max(map(round, costs.peaks)),
                "memory": self.memory,
                "gap": (best.per_sample - bound) / best.per_sample,
                "compared": [_shown(row, best) for row in rows],
            },
        }


def _shown_bytes(count: float) -> str:
    return format_bytes(int(count), is_decimal=True)


def _shown(row: _Row, best: _Found) -> dict[str, Any]:
    found = row.found
    return {
        "job": str(row.job),
        "seconds_per_sample": found.per_sample if found else None,
        "at_least": row.bound,
        "bytes": round(max(found.costs.peaks)) if found else None,
        "recomputed": len(found.costs.recompute) if found else 0,
        "why": "chosen" if found and found.job == best.job else row.why,
    }

"""`plan`: the fastest layouts of a training job on a cluster, without a device and without processes.

plans = nxd.plan("llama-70b", global_batch=1024, seq_len=8192, cluster=Cluster.preset("h100", 1024))
print(plans)                        # a table, fastest first
print(plans[0].explain())           # seconds by term, bytes by stage
print(plans.why_not(tp=4, pp=2))
plans[0].save("llama.plan.json")
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

from ..nearest import nearest
from ..planning.layout import DTYPES, Layout, format_bytes, format_count
from ..planning.plan import PlanError
from .candidate import RECOMPUTED
from .cluster import Cluster
from .layout_plan import TERMS, LayoutPlan
from .plan_check import problem_of
from .predictor import Predictor
from .search import MARGIN, SCHEDULES, Found, Job, groups, search, smallest
from .workload import MODELS, Workload, config_of, workload_of

__all__ = ["CONSTRAINTS", "Plans", "plan"]

_DEGREES = ("tp", "pp", "cp", "ep", "dp", "num_microbatches", "micro_batch", "virtual_pipeline_size")
#: Names of constraints, with the values that they can have; None: positive integers.
CONSTRAINTS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(_DEGREES),
    **dict.fromkeys(
        ("sequence_parallel", "zero1", "pad_heads", "pad_vocab", "fused_loss", "compiled", "overlap"), (False, True)
    ),
    "recompute": RECOMPUTED,
    "schedule": tuple(dict.fromkeys(name for name, _ in SCHEDULES)),
    "dtype": DTYPES,
}


class Plans(Sequence[LayoutPlan]):
    """The fastest layouts of a job, fastest first; each is type-checked when it is first read.

    Attributes:
        workload, cluster, job: what was planned.
        refused: plans that the type checker refused, in words, with the reason.
        unproven: why types of plans were not checked; empty: they were.
        on_check: called with a plan, in words, before its program is checked; None: nothing is.
    """

    def __init__(
        self, predictor: Predictor, job: Job, found: Sequence[Found], *, config: Any = None, checked: bool = True
    ) -> None:
        self.workload, self.cluster, self.job = predictor.workload, predictor.cluster, job
        self.refused: dict[str, str] = {}
        self.unproven: set[str] = set()
        self.on_check: Callable[[str], None] | None = None
        self._predictor, self._found, self._config, self._is_checked = predictor, found, config, checked

    @cached_property
    def _plans(self) -> list[LayoutPlan]:
        """The plans that pass; of more candidates, where none of the fastest does."""
        found, wanted = self._found, len(self._found)
        while True:
            plans = [plan for one in found if (plan := self._plan(one)) is not None]
            if plans or len(found) < wanted or wanted > 100:
                break
            wanted *= 3
            found = search(self._predictor, self.job, wanted, self.cluster.memory * (1 - MARGIN))
        if not plans:
            head = "plan: the type checker refuses all plans; check=False (--no-check) shows them"
            raise PlanError("\n  - ".join([head, *self._refusals()]))
        return plans

    def _plan(self, found: Found) -> LayoutPlan | None:
        """Returns the plan, or None where the type checker refuses its program."""
        plan = LayoutPlan(*found, self.workload, self.cluster)
        if self._is_checked:
            begins = None if self.on_check is None else partial(self.on_check, plan.words())
            if problem := problem_of(plan.candidate, self.workload, self._config, begins, self.unproven.add):
                self.refused[plan.words()] = problem
                return None
        return plan

    def _refusals(self) -> list[str]:
        """Returns a line for each different problem: the plans that have it, and what it is."""
        plans: dict[str, list[str]] = {}
        for words, problem in self.refused.items():
            plans.setdefault(problem.partition("\n")[0], []).append(words)
        return [f"{'; '.join(words)}: {problem}" for problem, words in plans.items()]

    def __len__(self) -> int:
        return len(self._plans)

    def __getitem__(self, index: Any) -> Any:
        return self._plans[index]

    def __iter__(self) -> Iterator[LayoutPlan]:
        return iter(self._plans)

    def __str__(self) -> str:
        return self.table(self)

    def table(self, plans: Sequence[LayoutPlan]) -> str:
        """Returns plans as a table."""
        job, workload = self.job, self.workload
        title = (
            f"{workload.name} ({format_count(workload.num_parameters)} parameters) on {self.cluster.devices} x "
            f"{self.cluster.name}, {job.global_batch} x {job.seq_len} tokens a step"
        )
        header = ["", "layout", "s/step", "tokens/s/device", "MFU", "waiting", "peak", "left"]
        rows = [header]
        for number, plan in enumerate(plans, 1):
            waiting = plan.seconds.bubble / plan.seconds.total
            rows.append(
                [
                    str(number),
                    plan.words(),
                    f"{plan.seconds.total:.4g}",
                    f"{plan.tokens_per_second:,.0f}",
                    f"{plan.mfu:.1%}",
                    f"{waiting:.1%}",
                    format_bytes(plan.peak),
                    f"{plan.margin:.0%}",
                ]
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = [
            "  ".join(
                [
                    cell.ljust(width) if column == 1 else cell.rjust(width)
                    for column, (cell, width) in enumerate(zip(row, widths))
                ]
            ).rstrip()
            for row in rows
        ]
        refusals = [f"not shown, as the type checker refuses it: {text}" for text in self._refusals()[:3]]
        refusals += [f"types are not checked: {reason.partition(chr(10))[0]}" for reason in sorted(self.unproven)]
        return "\n".join([title, "", *lines, *[""] * bool(refusals), *refusals])

    def explain(self, model: str = "FOLDER") -> str:
        """Returns the best plan in detail; `model`: the folder in its command."""
        return self._plans[0].explain(model)

    def why(self) -> str:
        """Returns why the best plan is chosen, in four lines: layout, seconds, memory, and the next plan."""
        best, cluster = self[0], self.cluster
        bubble = best.seconds.bubble / best.seconds.total
        slower = (
            f"{self[1].seconds.total / best.seconds.total - 1:+.1%} for {self[1].words()}" if self[1:] else "no other"
        )
        lines = [
            best.words(),
            f"  {best.seconds.total:.4g} s a step by the {cluster.name} preset, MFU {best.mfu:.1%}, "
            f"{bubble:.1%} waiting",
            f"  {format_bytes(best.peak)} of {format_bytes(cluster.memory)} a device, {best.margin:.0%} left",
            f"  the next one: {slower}",
        ]
        return "\n".join(lines)

    @cached_property
    def front(self) -> list[LayoutPlan]:
        """The plans of which no other is both faster and smaller, fastest first; at most 12."""
        limit = self.cluster.memory * (1 - MARGIN)
        front: list[LayoutPlan] = []
        while len(front) < 12:
            found = search(self._predictor, self.job, 1, limit)
            if not found:
                break
            if (smaller := self._plan(found[0])) is not None:
                front.append(smaller)
            limit = found[0].peak * 0.97
        return front

    def pareto(self) -> list[LayoutPlan]:
        """Returns the front of time against memory: `front`, in steps of at least 3 % of memory."""
        return self.front

    def why_not(self, **constraints: Any) -> str:
        """Returns why the best plan has not these values, as text: what is impossible, or how much slower it is.

        Raises:
            PlanError: there is no such constraint.
        """
        asked = Job(self.job.global_batch, self.job.seq_len, {**self.job.fixed, **_checked(constraints)})
        words = ", ".join(f"{name} {_shown(asked.fixed[name])}" for name in constraints)
        found = search(self._predictor, asked, 1, self.cluster.memory * (1 - MARGIN))
        if not found:
            return f"{words}: {_nothing(self._predictor, asked)}"
        best, other = self._plans[0], self._plan(found[0])
        if other is None:
            return "\n".join([f"{words}: the type checker refuses the best plan", *self._refusals()])
        slower = other.seconds.total / best.seconds.total - 1
        lines = [f"{words}: at best {other.words()}: {other.seconds.total:.4g} s, {slower:+.1%} of the best plan"]
        lines.append(f"  the best plan: {best.words()}: {best.seconds.total:.4g} s")
        for field in fields(best.seconds):
            difference = getattr(other.seconds, field.name) - getattr(best.seconds, field.name)
            if abs(difference) > 0.002 * best.seconds.total:
                lines.append(f"  {TERMS[field.name]:46} {difference:+10.4g} s")
        lines.append(f"  {'peak':46} {format_bytes(other.peak)}, of the best plan {format_bytes(best.peak)}")
        return "\n".join(lines)


def plan(
    model: Any,
    *,
    global_batch: int,
    seq_len: int,
    cluster: Cluster | str,
    devices: int | None = None,
    constraints: Mapping[str, Any] | None = None,
    top_k: int = 10,
    check: bool = True,
) -> Plans:
    """Returns the fastest layouts that fit into the memory of the devices, with 5 % of it left free.

    Every layout that `Layout.check` accepts is considered: degrees, sequence parallelism, ZeRO-1, microbatches,
    schedules, recomputation. docs/planner.md has the formulas.

    Args:
        model: a name ("llama-70b"), a Hugging Face config, its file or folder, a module with a config, or a `Workload`.
        global_batch, seq_len: sequences of a step, and tokens of a sequence.
        cluster: speeds and sizes of the devices, or the name of a preset.
        devices: number of devices; None: those of the cluster.
        constraints: values, or collections of values, by the names of `CONSTRAINTS`: `{"tp": 8, "zero1": True}`.
        top_k: number of plans.
        check: type-check each plan before it is shown, with fewer layers and ranks; one that fails is not shown, and
            reported in `Plans.refused`. False: do not.

    Raises:
        PlanError: no layout is possible, or none fits; the message names the constraint that excludes all, and the
            nearest plan without it.
        ValueError: the model is not known.
    """
    if isinstance(cluster, str):
        cluster = Cluster.preset(cluster, devices)
    elif devices is not None:
        cluster = cluster.of(devices)
    for name, value in (("global_batch", global_batch), ("seq_len", seq_len), ("top_k", top_k)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"plan: {name} must be a positive integer, got {value!r}")
    predictor = Predictor(workload_of(model), cluster)
    job = Job(global_batch, seq_len, _checked(constraints or {}))
    found = search(predictor, job, top_k, cluster.memory * (1 - MARGIN))
    if not found:
        raise PlanError(f"plan: {_nothing(predictor, job)}")
    return Plans(predictor, job, found, config=_config_of(model), checked=check)


def _config_of(model: Any) -> Any:
    """Returns the Hugging Face config of a model; None: there is none."""
    if isinstance(model, Workload) or (isinstance(model, str) and model in MODELS):
        return None
    return config_of(model) if isinstance(model, (str, Path)) else getattr(model, "config", model)


def _checked(constraints: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Returns constraints as tuples of values.

    Raises:
        PlanError: there is no such constraint, or no such value.
    """
    checked = {}
    for name, value in constraints.items():
        if name not in CONSTRAINTS:
            raise PlanError(
                f"plan: there is no constraint {name!r}; nearest: {nearest(name, CONSTRAINTS)}. There are "
                f"{', '.join(CONSTRAINTS)}"
            )
        is_collection = isinstance(value, Collection) and not isinstance(value, str)
        values = tuple(dict.fromkeys(value)) if is_collection else (value,)
        known = CONSTRAINTS[name]
        for one in values:
            if known is None:
                if not isinstance(one, int) or isinstance(one, bool) or one < 1:
                    raise PlanError(f"plan: {name} must be a positive integer, got {one!r}")
            elif one not in known:
                words = ", ".join("'' (none)" if word == "" else repr(word) for word in known)
                raise PlanError(f"plan: {name} must be one of {words}, got {one!r}")
        if not values:
            raise PlanError(f"plan: the constraint {name} has no value: leave it out to search all")
        checked[name] = values
    return checked


def _shown(values: Collection[Any]) -> str:
    return " or ".join("none" if value == "" else str(value) for value in values)


def _nothing(predictor: Predictor, job: Job) -> str:
    """Returns why no plan was found, and what would work."""
    limit = predictor.cluster.memory * (1 - MARGIN)
    workload, world = predictor.workload, predictor.cluster.devices
    possible = next(groups(workload, world, job), None)
    what = f"{workload.name} on {world} x {predictor.cluster.name}"
    lines = []
    if possible is None:
        lines.append(f"no layout of {what} is possible")
    else:
        least = smallest(predictor, job)
        if least is None:
            lines.append(f"no layout of {what} is possible")
        else:
            need = format_bytes(least.peak / (1 - MARGIN))
            words = LayoutPlan(*least, workload, predictor.cluster).words()
            lines.append(
                f"{what} does not fit: the smallest layout ({words}) needs {format_bytes(least.peak)}, with "
                f"{MARGIN:.0%} left free {need}, and a device has {format_bytes(predictor.cluster.memory)}"
            )
    return "\n  - ".join([*lines, *_ways_out(predictor, job, limit)])


def _ways_out(predictor: Predictor, job: Job, limit: float) -> Iterator[str]:
    """Yields what would work: without one of the constraints, with more devices."""
    workload, cluster = predictor.workload, predictor.cluster
    excluding = False
    yield from _reasons(predictor, job)
    for name in job.fixed:
        found = search(predictor, job.without(name), 1, limit)
        if found:
            excluding = True
            words = LayoutPlan(*found[0], workload, cluster).words()
            yield f"{name} {_shown(job.fixed[name])} excludes all; without it: {words}"
    if job.fixed and not excluding:
        found = search(predictor, Job(job.global_batch, job.seq_len, {}), 1, limit)
        if found:
            excluding = True
            words = LayoutPlan(*found[0], workload, cluster).words()
            yield f"the constraints exclude all together; without any: {words}"
    if workload.undivided and job.fixed.get("tp", (1,)) != (1,):
        yield f"tp is 1 for {workload.name}: what tp sends of its joined weights, {workload.undivided}, is not modelled"
    if excluding:
        return
    if workload.max_positions is not None and job.seq_len > workload.max_positions:
        return  # `_reasons` has it
    if next(groups(workload, cluster.devices, job), None) is None:
        yield from _nearest_possible(predictor, job, limit)
        return
    for factor in (2**n for n in range(1, 9)):
        larger = Predictor(workload, cluster.of(cluster.devices * factor))
        found = search(larger, job, 1, limit)
        if found:
            words = LayoutPlan(*found[0], workload, larger.cluster).words()
            yield f"it fits on {cluster.devices * factor} devices: {words}"
            return


def _reasons(predictor: Predictor, job: Job) -> Iterator[str]:
    """Yields what is wrong with the values that are fixed, whatever the others are."""
    workload, world, batch = predictor.workload, predictor.cluster.devices, job.global_batch
    one: dict[str, Any] = {name: next(iter(values)) for name, values in job.fixed.items() if len(values) == 1}
    names, words = ("dp", "num_microbatches", "micro_batch"), "dp {} x {} microbatches of {}"
    least, sizes = [min(job.fixed.get(name, (1,))) for name in names], [one.get(name, 1) for name in names]
    if batch < (share := prod(least)):
        yield f"a batch of {batch} is smaller than {words.format(*least)} = {share}: use a batch of {share}"
    elif batch % (share := prod(sizes)):
        near = f"{batch // share * share} or {(batch // share + 1) * share}"
        yield f"a batch of {batch} is not divisible by {words.format(*sizes)} = {share}: use a batch of {near}"
    degrees = {name: one[name] for name in ("tp", "pp", "cp", "dp") if name in one}
    if "dp" in one and world % prod(degrees.values()):
        words = " x ".join(f"{name} {size}" for name, size in degrees.items())
        yield f"{world} devices are not divisible by {words} = {prod(degrees.values())}"
    elif len(degrees) == 4 and world != prod(degrees.values()):
        words = " x ".join(f"{name} {size}" for name, size in degrees.items())
        yield f"{words} are {prod(degrees.values())} ranks, and there are {world} devices"
    if one.get("cp", 1) > 1 and not workload.allows_context_parallel:
        yield f"cp {one['cp']}: the attention of {workload.name} is not divided over cp: use cp 1"
    if one.get("sequence_parallel") and not workload.allows_sequence_parallel:
        yield f"sequence_parallel True: {workload.name} does not allow it: use False"
    if one.get("sequence_parallel") and one.get("tp") == 1:
        yield "sequence_parallel True has no effect with tp 1, along which it shards: use False, or a tp of 2 or more"
    if one.get("overlap") and one.get("zero1") is False:
        yield "overlap True is of ZeRO-1's collectives, and zero1 is False: use zero1 True, or overlap False"
    elif one.get("overlap") and "zero1" not in one and one.get("cp") == 1 and one.get("dp") == 1:
        yield "overlap True is of ZeRO-1's collectives, and dp 1 x cp 1 ranks have none: use overlap False"
    if one.get("schedule") == "interleaved":
        one.setdefault("virtual_pipeline_size", 2)
    needs_pipeline = one.get("schedule", "1f1b") != "1f1b" or one.get("virtual_pipeline_size", 1) > 1
    pp = one.setdefault("pp", 2 if needs_pipeline and world // prod(degrees.values()) % 2 == 0 else 1)
    microbatches = one.setdefault("num_microbatches", 2 * pp)
    values = {"pad_heads": True, "pad_vocab": True} | {x.name: one[x.name] for x in fields(Layout) if x.name in one}
    layout = Layout(world, **values, global_batch=world * microbatches, seq_len=job.seq_len)  # a batch that all divide
    yield from layout.problems(workload.shape)


def _nearest_possible(predictor: Predictor, job: Job, limit: float) -> Iterator[str]:
    """Yields the nearest numbers of devices, and the next global batch, that have a plan."""
    workload, cluster = predictor.workload, predictor.cluster
    host = cluster.devices_per_host
    works = []
    for sign in (-1, 1):
        for hosts in range(1, 17):
            devices = cluster.devices + sign * hosts * host
            if devices > 0 and search(Predictor(workload, cluster.of(devices)), job, 1, limit):
                works.append(str(devices))
                break
    if works:
        yield f"use {' or '.join(works)} devices"
    for batch in range(job.global_batch + 1, job.global_batch + cluster.devices + 1):
        larger = replace(job, global_batch=batch)
        if next(groups(workload, cluster.devices, larger), None) and search(predictor, larger, 1, limit):
            yield f"use a global batch of {batch}"
            return

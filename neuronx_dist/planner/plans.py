"""`plan`: the fastest layouts of a training job on a cluster, without a device and without processes.

plans = nxd.plan("llama-70b", global_batch=1024, seq_len=8192, cluster=Cluster.preset("h100", 1024))
print(plans)                        # a table, fastest first
print(plans[0].explain())           # seconds by term, bytes by stage
print(plans.why_not(tp=4, pp=2))
plans[0].save("llama.plan.json")
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from os import PathLike
from typing import Any

from ..nearest import nearest
from ..planning.layout import DTYPES, Layout, format_bytes, format_count
from ..planning.plan import JobPlan, Plan, PlanError
from .candidate import RECOMPUTED, Candidate
from .cluster import Cluster
from .predictor import Predictor
from .search import MARGIN, SCHEDULES, Found, Job, groups, search, smallest
from .seconds import StepSeconds
from .stage_memory import StageBytes
from .workload import Workload, workload_of

__all__ = ["CONSTRAINTS", "TERMS", "LayoutPlan", "Plans", "plan"]

_DEGREES = ("tp", "pp", "cp", "ep", "dp", "num_microbatches", "micro_batch", "virtual_pipeline_size")
#: Names of constraints, with the values that they can have; None: positive integers.
CONSTRAINTS: dict[str, tuple[Any, ...] | None] = {
    **dict.fromkeys(_DEGREES),
    **dict.fromkeys(("sequence_parallel", "zero1", "pad_heads", "pad_vocab", "fused_loss", "compiled"), (False, True)),
    "recompute": RECOMPUTED,
    "schedule": tuple(dict.fromkeys(name for name, _ in SCHEDULES)),
    "dtype": DTYPES,
}


@dataclass(frozen=True)
class LayoutPlan:
    """A layout that fits, with what it is predicted to take.

    Attributes:
        candidate: the layout and the options of its step.
        seconds: of a step, by term.
        stages: bytes of a rank, by stage.
        workload, cluster: what it was predicted for.
    """

    candidate: Candidate
    seconds: StepSeconds
    stages: tuple[StageBytes, ...]
    workload: Workload
    cluster: Cluster

    @property
    def layout(self) -> Layout:
        return self.candidate.layout

    @property
    def peak(self) -> float:
        """Bytes of the rank that needs most."""
        return max(stage.peak for stage in self.stages)

    @property
    def margin(self) -> float:
        """Share of a device's memory that is left."""
        return 1 - self.peak / self.cluster.memory

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and device."""
        layout = self.layout
        return layout.global_batch * layout.seq_len / self.seconds.total / layout.world_size

    @property
    def mfu(self) -> float:
        """Share of the peak that the model's operations are, without those that are computed again."""
        flops = self.workload.flops_per_token(self.layout.seq_len) * self.tokens_per_second
        return flops / self.cluster.peak[self.layout.dtype]

    def words(self) -> str:
        """Returns the layout in a line."""
        layout, candidate = self.layout, self.candidate
        degrees = [("tp", layout.tp), ("pp", layout.pp), ("cp", layout.cp), ("ep", layout.ep), ("dp", layout.dp)]
        words = [f"{name} {size}" for name, size in degrees if size > 1] or ["one device"]
        words += ["SP"] * layout.sequence_parallel + ["ZeRO-1"] * layout.zero1
        words.append(f"{layout.num_microbatches} x {layout.micro_batch}")
        if layout.pp > 1:
            chunks = f" ({layout.virtual_pipeline_size} chunks)" if layout.virtual_pipeline_size > 1 else ""
            words.append(f"{layout.schedule}{chunks}")
        if candidate.recompute:
            words.append(f"recompute {candidate.recompute}")
        return ", ".join(words)

    def train_flags(self) -> str:
        """Returns the flags of `neuronx-dist train` for this layout, without those of the model and the data."""
        layout, candidate = self.layout, self.candidate
        options: dict[str, Any] = {"nproc": layout.world_size}
        options |= {name: size for name in ("tp", "pp", "cp", "ep") if (size := getattr(layout, name)) > 1}
        switches = ("sequence_parallel", "zero1", "pad_heads", "pad_vocab")
        options |= {name: "" for name in switches if getattr(layout, name)}
        options |= {"fused_loss": ""} if candidate.fused_loss else {}
        options |= {"recompute": candidate.recompute} if candidate.recompute else {}
        if layout.pp > 1:
            options["schedule"] = layout.schedule
        if layout.virtual_pipeline_size > 1:
            options["virtual_pipeline_size"] = layout.virtual_pipeline_size
        options |= {"microbatches": layout.num_microbatches, "global_batch": layout.global_batch}
        options |= {"seq_len": layout.seq_len, "dtype": layout.dtype}
        return " ".join(f"--{name.replace('_', '-')} {value}".rstrip() for name, value in options.items())

    def explain(self) -> str:
        """Returns the seconds by term, the bytes by stage and the command that trains in this layout, as text."""
        seconds, total = self.seconds, self.seconds.total
        lines = [
            self.words(),
            f"{total:.4g} s a step, {self.tokens_per_second:,.0f} tokens/s a device, MFU {self.mfu:.1%}",
        ]
        for field in fields(seconds):
            value = getattr(seconds, field.name)
            if value:
                lines.append(f"  {TERMS[field.name]:46} {value:10.4g} s  {value / total:6.1%}")
        left, rest = format_bytes(abs(self.cluster.memory - self.peak)), abs(self.margin)
        words = f"{left} ({rest:.0%}) left" if self.margin >= 0 else f"{left} ({rest:.0%}) too much, it does not fit"
        lines.append(f"peak {format_bytes(self.peak)} of {format_bytes(self.cluster.memory)}: {words}")
        shown = (
            range(len(self.stages)) if len(self.stages) <= 6 else [0, 1, 2, len(self.stages) - 2, len(self.stages) - 1]
        )
        lines.append("  ".join(["stage".ljust(14), *(str(stage).rjust(10) for stage in shown)]))
        for name in (*StageBytes._fields[:-1], "peak"):
            cells = [format_bytes(getattr(self.stages[stage], name)).rjust(10) for stage in shown]
            lines.append("  ".join([name.ljust(14), *cells]))
        return "\n".join([*lines, f"to train in this layout: neuronx-dist train {self.train_flags()}"])

    @property
    def plan(self) -> Plan:
        """Returns the plan that a file holds."""
        layout, candidate = self.layout, self.candidate
        return Plan(
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            schedule=str(layout.schedule),
            microbatches=layout.num_microbatches,
            job=JobPlan(
                cp=layout.cp,
                ep=layout.ep,
                sequence_parallel=layout.sequence_parallel,
                zero1=layout.zero1,
                pad_heads=layout.pad_heads,
                pad_vocab=layout.pad_vocab,
                virtual_pipeline_size=layout.virtual_pipeline_size,
                global_batch=layout.global_batch,
                seq_len=layout.seq_len,
                dtype=layout.dtype,
                recompute=candidate.recompute,
                fused_loss=candidate.fused_loss,
                model=self.workload.name,
                num_parameters=self.workload.num_parameters,
            ),
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan's file, which `Plan.load` reads."""
        self.plan.save(path)

    @classmethod
    def load(cls, path: str | PathLike[str], model: Any, cluster: Cluster) -> LayoutPlan:
        """Reads a plan's file, which may have been edited, and predicts its step.

        Raises:
            PlanError: the file is no plan of `nxd.plan`, or was made for another model or number of devices, or its
                layout is impossible; the message lists the differences.
        """
        planned, workload = Plan.load(path), workload_of(model)
        if planned.job is None:
            raise PlanError(f"{path} is a plan of `parallelize`, which has no batch: use a file of `nxd.plan`")
        candidate = _candidate_of(planned, workload, cluster.devices, str(path))
        predictor = Predictor(workload, cluster)
        stages = tuple(predictor.stage_bytes(candidate, stage) for stage in range(candidate.layout.pp))
        return cls(candidate, predictor.seconds(candidate), stages, workload, cluster)

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan and its figures as data for JSON."""
        figures = {"seconds": self.seconds.total, "tokens_per_second": self.tokens_per_second, "mfu": self.mfu}
        return {
            "layout": asdict(self.layout) | {"dp": self.layout.dp},
            "recompute": self.candidate.recompute,
            "fused_loss": self.candidate.fused_loss,
            **figures,
            "terms": asdict(self.seconds),
            "peak": self.peak,
            "margin": self.margin,
            "stages": [stage._asdict() | {"peak": stage.peak} for stage in self.stages],
        }


#: Terms of `StepSeconds`, in words.
TERMS = {
    "products": "matrix products",
    "attention": "attention",
    "pointwise": "pointwise operations, empty calls",
    "tp": "collectives of tp",
    "cp": "messages of attention over cp",
    "ep": "tokens to experts over ep",
    "recomputation": "forwards computed again",
    "bubble": "waiting in the pipeline, with messages",
    "reduction": "reduction of gradients, gathers of ZeRO-1",
    "optimizer": "optimizer",
}


class Plans(Sequence[LayoutPlan]):
    """The fastest layouts of a job, fastest first.

    Attributes:
        workload, cluster, job: what was planned.
    """

    def __init__(self, predictor: Predictor, job: Job, found: Sequence[Found]) -> None:
        self.workload, self.cluster, self.job = predictor.workload, predictor.cluster, job
        self._predictor = predictor
        self._plans = [self._plan(one) for one in found]

    def _plan(self, found: Found) -> LayoutPlan:
        return LayoutPlan(*found, self.workload, self.cluster)

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
        return "\n".join([title, "", *lines])

    def explain(self) -> str:
        """Returns the best plan in detail."""
        return self._plans[0].explain()

    @cached_property
    def front(self) -> list[LayoutPlan]:
        """The plans of which no other is both faster and smaller, fastest first; at most 12."""
        limit = self.cluster.memory * (1 - MARGIN)
        front: list[LayoutPlan] = []
        while len(front) < 12:
            found = search(self._predictor, self.job, 1, limit)
            if not found:
                break
            front.append(self._plan(found[0]))
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
    return Plans(predictor, job, found)


def _candidate_of(planned: Plan, workload: Workload, devices: int, path: str) -> Candidate:
    """Returns the candidate that a plan describes.

    Raises:
        PlanError: it was planned for another model or number of devices, or it is impossible.
    """
    job = planned.job
    assert job is not None
    differences = []
    if job.num_parameters != workload.num_parameters:
        differences.append(
            f"model: {job.model} with {job.num_parameters:,} parameters in the plan, {workload.name} with "
            f"{workload.num_parameters:,} here"
        )
    ranks = planned.tp * planned.pp * planned.dp * job.cp
    if ranks != devices:
        degrees = f"tp={planned.tp} x pp={planned.pp} x cp={job.cp} x dp={planned.dp} = {ranks}"
        differences.append(f"devices: {degrees} in the plan, {devices} here")
    if job.recompute not in RECOMPUTED:
        differences.append(f"recompute: {job.recompute!r} in the plan; known are {', '.join(map(repr, RECOMPUTED))}")
    if differences:
        raise PlanError("\n  - ".join([f"{path} was made for another job:", *differences]))
    of_layout = {field.name for field in fields(Layout)} & {*job._fields}
    layout = Layout(
        devices,
        tp=planned.tp,
        pp=planned.pp,
        num_microbatches=planned.microbatches,
        schedule=planned.schedule,
        **{name: getattr(job, name) for name in of_layout},
    )
    problems = layout.problems(workload.shape)
    if problems:
        raise PlanError("\n  - ".join([f"{path} cannot work:", *problems]))
    return Candidate(layout, job.recompute, job.fused_loss)


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
                raise PlanError(f"plan: {name} must be one of {', '.join(map(repr, known))}, got {one!r}")
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
    if workload.joined and job.fixed.get("tp", (1,)) != (1,):
        yield f"tp is 1 for {workload.name}: what tp sends of its joined weights, {workload.joined}, is not modelled"
    if excluding:
        return
    if workload.max_positions is not None and job.seq_len > workload.max_positions:
        yield f"seq_len {job.seq_len} is longer than the model's {workload.max_positions} positions"
        return
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

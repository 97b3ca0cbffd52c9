"""`LayoutPlan`: a layout with its predicted seconds and bytes, as text, as flags of `neuronx-dist train`, as a file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from os import PathLike
from typing import Any

from ..model_shape import padded_heads
from ..planning.layout import Layout, format_bytes
from ..planning.plan import JobPlan, Plan, PlanError
from .candidate import RECOMPUTED, Candidate
from .cluster import Cluster
from .predictor import Predictor
from .seconds import StepSeconds
from .stage_memory import StageBytes
from .workload import Workload, workload_of

__all__ = ["TERMS", "LayoutPlan"]

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
# Options of `neuronx-dist train` whose default is not False.
_TRAIN_DEFAULTS = {
    **dict.fromkeys(("tp", "pp", "cp", "ep", "virtual_pipeline_size"), 1),
    "recompute": "none",
    "schedule": None,
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
        words += ["SP"] * layout.sequence_parallel + ["ZeRO-1"] * layout.zero1 + ["overlap"] * candidate.overlap
        words.append(f"{layout.num_microbatches} x {layout.micro_batch}")
        if layout.pp > 1:
            chunks = f" ({layout.virtual_pipeline_size} chunks)" if layout.virtual_pipeline_size > 1 else ""
            words.append(f"{layout.schedule}{chunks}")
        if candidate.recompute:
            words.append(f"recompute {candidate.recompute}")
        words += ["compiled"] * candidate.compiled
        return ", ".join(words)

    def train_options(self) -> dict[str, Any]:
        """Returns the options of `neuronx-dist train` that make this layout, by name."""
        layout = self.layout
        names = (
            "tp",
            "pp",
            "cp",
            "ep",
            "sequence_parallel",
            "zero1",
            "pad_heads",
            "pad_vocab",
            "virtual_pipeline_size",
        )
        return {
            **{name: getattr(layout, name) for name in names},
            "fused_loss": self.candidate.fused_loss,
            "overlap": self.candidate.overlap,
            "recompute": self.candidate.recompute or "none",
            "schedule": layout.schedule if layout.pp > 1 else None,
            "microbatches": layout.num_microbatches,
        }

    def train_flags(self, *, batch: bool = True) -> list[str]:
        """Returns the flags of `neuronx-dist train` for this layout, without those of the model and the data.

        Args:
            batch: with the number of ranks, the batch, the length of sequences and the dtype.
        """
        layout, options = self.layout, self.train_options()
        if batch:
            options |= {"nproc": layout.world_size, "global_batch": layout.global_batch}
            options |= {"seq_len": layout.seq_len, "dtype": layout.dtype}
        words: list[str] = []
        for name, value in options.items():
            if value != _TRAIN_DEFAULTS.get(name, False):
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return words

    def train_command(self, model: str = "FOLDER") -> str:
        """Returns the command that trains a model's folder in this layout; on several hosts, on each of them."""
        flags, world, per_host = self.train_flags(), self.layout.world_size, self.cluster.devices_per_host
        command = "neuronx-dist train"
        if world > per_host:
            number = flags.index("--nproc")
            del flags[number : number + 2]
            command = (
                f"neuronx-dist run --nnodes {world // per_host} --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
                f"--nproc-per-node {per_host} -m neuronx_dist train"
            )
        return " ".join([command, f"--model {shlex.quote(model)}", *flags])

    def explain(self, model: str = "FOLDER") -> str:
        """Returns the seconds by term, the bytes by stage and the command that trains in this layout, as text.

        Args:
            model: the folder in the command.
        """
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
        return "\n".join([*lines, f"to train in this layout: {self.train_command(model)}"])

    @property
    def plan(self) -> Plan:
        """Returns the plan that a file holds."""
        layout, candidate = self.layout, self.candidate
        return Plan(
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            zero1=layout.zero1,
            schedule=str(layout.schedule),
            microbatches=layout.num_microbatches,
            job=JobPlan(
                cp=layout.cp,
                ep=layout.ep,
                sequence_parallel=layout.sequence_parallel,
                pad_heads=layout.pad_heads,
                pad_vocab=layout.pad_vocab,
                virtual_pipeline_size=layout.virtual_pipeline_size,
                global_batch=layout.global_batch,
                seq_len=layout.seq_len,
                dtype=layout.dtype,
                recompute=candidate.recompute,
                fused_loss=candidate.fused_loss,
                overlap=candidate.overlap,
                compiled=candidate.compiled,
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
        loaded = cls(candidate, predictor.seconds(candidate), stages, workload, cluster)
        names = [field.name for field in fields(Plan) if field.name not in ("job", "costs")]
        if unread := [x for x in names if (getattr(planned, x) or None) != (getattr(loaded.plan, x) or None)]:
            raise PlanError(
                f"{path}: {unread[0]} is of a plan of `parallelize`, and has no effect here: leave "
                f"{getattr(loaded.plan, unread[0])!r} (what is recomputed is the word recompute of job)"
            )
        return loaded

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan and its figures as data for JSON."""
        figures = {"seconds": self.seconds.total, "tokens_per_second": self.tokens_per_second, "mfu": self.mfu}
        return {
            "layout": asdict(self.layout) | {"dp": self.layout.dp},
            "recompute": self.candidate.recompute,
            "fused_loss": self.candidate.fused_loss,
            "overlap": self.candidate.overlap,
            "compiled": self.candidate.compiled,
            **figures,
            "terms": asdict(self.seconds),
            "peak": self.peak,
            "margin": self.margin,
            "stages": [stage._asdict() | {"peak": stage.peak} for stage in self.stages],
        }


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
        zero1=planned.zero1,
        num_microbatches=planned.microbatches,
        schedule=planned.schedule,
        **{name: getattr(job, name) for name in of_layout},
    )
    problems = layout.problems(workload.shape)
    if not workload.divides(layout.tp):
        problems.append(f"tp {layout.tp} does not divide all weights of {workload.name}")
    if job.overlap and not layout.zero1:
        raise PlanError(f"{path}: overlap is of ZeRO-1's collectives, and zero1 is False: set one of them otherwise")
    if problems:
        problems.append(f"the nearest layout that works: {layout.nearest(workload.shape)}")
        raise PlanError("\n  - ".join([f"{path} cannot work:", *problems]))
    if unread := list(_without_effect(layout, workload)):
        raise PlanError("\n  - ".join([f"{path} has keys without effect:", *unread]))
    return Candidate(layout, job.recompute, job.fused_loss, job.compiled, overlap=job.overlap)


def _without_effect(layout: Layout, workload: Workload) -> Iterator[str]:
    """Yields values of a plan that change nothing in this layout."""
    if layout.pp == 1 and layout.schedule != "1f1b":
        yield f"schedule {layout.schedule!r} is of a pipeline, and pp is 1: write '1f1b'"
    if layout.tp == 1 and layout.sequence_parallel:
        yield "sequence_parallel shards along tp, and tp is 1: write false"
    heads = padded_heads(workload.heads, workload.kv_heads, layout.tp)
    if layout.pad_heads and not heads.pads(workload.heads, workload.kv_heads):
        yield f"pad_heads pads no heads of {workload.name} at tp {layout.tp}: write false"
    if layout.pad_vocab and workload.vocab % layout.tp == 0:
        yield f"pad_vocab pads no vocabulary of {workload.name} at tp {layout.tp}: write false"

"""Prediction against measurement: the training step of a plan, run and timed.

result = validate(plan, config)           # on every rank of an initialized job: predicted beside measured
result.append("results.jsonl")            # on one rank; `Validation.load` reads all
job = TrainingJob(layout, config)         # the same without a plan
measured = job.measure(steps=5)           # seconds of a step, peak memory
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

import torch

from .. import comm
from ..accelerator.streams import synchronize
from ..gradients.reduce import reduce_gradients
from ..optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from ..planning.layout import Layout, format_bytes
from ..planning.memory import pipelined
from ..planning.meter import measure_peak
from ..planning.recompute import recompute
from ..weights.materialize import materialize
from .layout_plan import LayoutPlan
from .measure import fingerprint

__all__ = ["Measured", "TrainingJob", "Validation", "validate"]


@dataclass(frozen=True)
class Measured:
    """Steps of a job, measured.

    Attributes:
        seconds: of each step, on the slowest rank.
        cpu_seconds: of each step, of all ranks together; on a loaded machine it is steadier.
        peak: bytes alive at one time on the rank with the most.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    peak: int

    @property
    def median(self) -> float:
        return median(self.seconds)


class TrainingJob:
    """The training step of a layout on this rank of an initialized job: a causal LM of random weights on random tokens.

    Args:
        layout: the mesh of the job is `layout.mesh()`.
        config: config of a Hugging Face causal LM.
        fused_loss: that of `hf.swap`.
        recomputed: argument of `nxd.recompute`; "": nothing is recomputed.
        overlap: argument of `NeuronZero1Optimizer`.
        optimizer_class: the optimizer that `NeuronZero1Optimizer` or `MasterWeightsOptimizer` wraps.
    """

    def __init__(
        self,
        layout: Layout,
        config: Any,
        *,
        fused_loss: bool = True,
        recomputed: str = "",
        overlap: bool = False,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        from transformers import AutoModelForCausalLM

        layout.check(config)
        if comm.current().mesh != layout.mesh():
            raise ValueError(
                f"the job's mesh is {comm.current().mesh}, the layout's {layout.mesh()}: initialize that one"
            )
        device = comm.current().backend.device
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, layout.dtype))
        self.zero1 = layout.zero1
        self.model: Any = pipelined(module, layout, fused_loss=fused_loss)
        if recomputed:
            recompute(self.model, recomputed)
        materialize(self.model, 0, device=device)
        self.params = [param for param in self.model.local_parameters() if param.requires_grad]
        wrapper: Any = partial(NeuronZero1Optimizer, overlap=overlap) if layout.zero1 else MasterWeightsOptimizer
        self.optimizer: Any = wrapper(self.params, optimizer_class)
        rows, columns = layout.micro_batch * layout.num_microbatches, layout.seq_len // layout.cp
        vocab = config.get_text_config().vocab_size
        ids = torch.randint(0, vocab, (rows, columns), generator=torch.Generator().manual_seed(0)).to(device)
        self.inputs = {"input_ids": ids, "labels": ids.roll(-1, dims=1)}
        if layout.cp > 1:
            self.inputs["position_ids"] = torch.arange(columns, device=device).expand_as(ids)
        self.inputs["num_items_in_batch"] = torch.tensor(float(rows * columns), device=device)

    def step(self) -> None:
        """Runs forward, backward, gradient reduction and optimizer."""
        self.model.run(self.model.training_schedule, self.inputs)
        reduce_gradients(self.model, average_over_data=not self.zero1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        comm.launch.end_step()

    def measure(self, steps: int = 5, *, warmup: int = 2) -> Measured:
        """Runs and times steps; all ranks return the same. Every rank of the job calls it."""
        for _ in range(warmup):
            self.step()
        times = [self.timed() for _ in range(steps)]
        held = [*self.model.local_parameters(), *self.model.local_buffers(), *self.inputs.values()]
        for master, state in self.optimizer.base_optimizer.state.items():
            held += [master, *(value for value in state.values() if isinstance(value, torch.Tensor))]
        peaks = []
        for _ in range(3):  # now and then a thread of gloo frees the buffers of a finished collective a moment late
            gc.collect()  # what waits for the collector would count
            with measure_peak(held=held) as meter:
                self.step()
            peaks.append(meter.peak)
        ranks: Any = comm.gather_objects((times, min(peaks)), "world")
        walls, cpus = ([[step[part] for step in rank[0]] for rank in ranks] for part in (0, 1))
        return Measured(
            tuple(map(max, zip(*walls, strict=True))),
            tuple(map(sum, zip(*cpus, strict=True))),
            max(r[1] for r in ranks),
        )

    def timed(self) -> tuple[float, float]:
        """Returns the wall and CPU seconds of a step that all ranks begin together."""
        device_type = comm.current().backend.device.type
        comm.barrier("world")
        synchronize(device_type)
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        synchronize(device_type)
        return time.perf_counter() - wall, time.process_time() - cpu


# --- a plan, validated ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Validation:
    """Prediction of a plan beside its measured steps; `str()` is three lines.

    Attributes:
        plan: the plan in words; `cluster`: name of the cluster that it was predicted for.
        predicted, measured: seconds of a step; `steps`: of each measured one.
        predicted_peak, measured_peak: bytes of the rank that needs most.
        machine: where it was measured; `other`: what differs from where the cluster's numbers were measured.
    """

    plan: str
    cluster: str
    predicted: float
    measured: float
    steps: tuple[float, ...]
    predicted_peak: float
    measured_peak: float
    machine: Mapping[str, str]
    other: Mapping[str, str]

    @property
    def error(self) -> float:
        """Relative error of the predicted seconds."""
        return self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted peak."""
        return self.predicted_peak / self.measured_peak - 1

    def __str__(self) -> str:
        spread = f"{min(self.steps) * 1e3:.1f} to {max(self.steps) * 1e3:.1f}"
        lines = [
            self.plan,
            f"  step  predicted {self.predicted * 1e3:.1f} ms, measured {self.measured * 1e3:.1f} ms ({spread} in "
            f"{len(self.steps)} steps): {self.error:+.1%}",
            f"  peak  predicted {format_bytes(self.predicted_peak)}, measured {format_bytes(self.measured_peak)}: "
            f"{self.memory_error:+.1%}",
        ]
        if self.other:
            lines.append(
                f"  {self.cluster} was measured elsewhere: "
                + ", ".join(
                    f"{name} {there!r} there, {self.machine[name]!r} here" for name, there in self.other.items()
                )
            )
        return "\n".join(lines)

    def append(self, path: str | PathLike[str]) -> None:
        """Adds the validation to a file, as a line of JSON."""
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> list[Validation]:
        """Reads the validations of a file."""
        content = [json.loads(line) for line in Path(path).read_text().splitlines()]
        return [cls(**{**one, "steps": tuple(one["steps"])}) for one in content]


def validate(plan: LayoutPlan, config: Any, *, steps: int = 5, warmup: int = 2) -> Validation:
    """Trains a few steps of a plan on random tokens, and returns the prediction beside what was measured.

    Every rank of a job whose mesh is `plan.layout.mesh()` calls it; all get the same.

    Args:
        config: config of the planned model.
        steps: number of timed steps, after `warmup` others.

    Raises:
        ValueError: the job has another mesh, or the plan is of compiled code.
    """
    candidate = plan.candidate
    if candidate.compiled:
        raise ValueError("validate: the plan is of compiled code, and this step is not: plan with compiled=False")
    options: dict[str, Any] = dict(fused_loss=candidate.fused_loss, recomputed=candidate.recompute)
    job = TrainingJob(candidate.layout, config, **options, overlap=candidate.overlap)
    measured = job.measure(steps, warmup=warmup)
    machine = fingerprint(comm.current().backend.device)
    return Validation(
        plan=plan.words(),
        cluster=plan.cluster.name,
        predicted=plan.seconds.total,
        measured=measured.median,
        steps=measured.seconds,
        predicted_peak=plan.peak,
        measured_peak=measured.peak,
        machine=machine,
        other={name: there for name, there in plan.cluster.fingerprint.items() if machine.get(name) != there},
    )

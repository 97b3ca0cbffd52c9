"""Prediction against measurement: the training step of a layout is run and timed, and errors are counted.

    job = TrainingJob(layout, config)         # on every rank of an initialized job
    measured = job.measure(steps=5)           # seconds of a step, peak memory

    mape(predicted, measured)                 # mean of |predicted / measured - 1|
    rank_correlation(predicted, measured)     # Spearman's: 1 if both order the layouts equally
    regret(predicted, measured)               # measured seconds of the predicted best over the measured best, less 1

    calibrated(cluster, predict, measured)    # the cluster's speeds, corrected by measured steps

Steps of a few layouts correct the speeds of a cluster for all others: collectives between products, products of a
model's sizes and Python's time are in them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import mean, median
from typing import Any

import torch

from .. import comm
from ..accelerator.streams import synchronize
from ..gradients.reduce import reduce_gradients
from ..hf.model_plan import transformer_layer_class
from ..hf.swap import swap
from ..optimizer import MasterWeightsOptimizer, NeuronZero1Optimizer
from ..pipeline.model import NxDPPModel
from ..planning.layout import Layout
from ..planning.meter import measure_peak
from ..weights.materialize import materialize
from .cluster import Cluster

__all__ = ["Measured", "TrainingJob", "calibrated", "mape", "rank_correlation", "regret"]


def mape(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns the mean absolute relative error of predictions."""
    return mean(abs(one / other - 1) for one, other in zip(predicted, measured, strict=True))


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns Spearman's rank correlation; equal values share the mean of their ranks."""
    one, other = _ranks(predicted), _ranks(measured)
    centre = (len(one) - 1) / 2
    covariance = sum((a - centre) * (b - centre) for a, b in zip(one, other, strict=True))
    variances = sum((a - centre) ** 2 for a in one) * sum((b - centre) ** 2 for b in other)
    return covariance / variances**0.5 if variances else 1.0


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns by which part the layout with the best prediction is slower than the best measured one."""
    chosen = min(range(len(predicted)), key=predicted.__getitem__)
    return measured[chosen] / min(measured) - 1


def _ranks(values: Sequence[float]) -> list[float]:
    below = [sum(other < value for other in values) for value in values]
    return [rank + (values.count(value) - 1) / 2 for rank, value in zip(below, values)]


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
        optimizer_class: the optimizer that `NeuronZero1Optimizer` or `MasterWeightsOptimizer` wraps.
    """

    def __init__(
        self,
        layout: Layout,
        config: Any,
        *,
        fused_loss: bool = True,
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
        swap(
            module,
            sequence_parallel=layout.sequence_parallel,
            pad_heads=layout.pad_heads,
            pad_vocab=layout.pad_vocab,
            inplace_logits=True,
            fused_loss=fused_loss,
        )
        self.zero1 = layout.zero1
        self.model: Any = NxDPPModel(
            module,
            transformer_layer_cls=transformer_layer_class(module),
            num_microbatches=layout.num_microbatches,
            virtual_pipeline_size=layout.virtual_pipeline_size,
            schedule=layout.schedule,
            output_loss_value_spec={"loss": True, "logits": False},
            auto_partition=True,
            use_zero1_optimizer=layout.zero1,
        )
        materialize(self.model, 0, device=device)
        self.params = [param for param in self.model.local_parameters() if param.requires_grad]
        wrapper = NeuronZero1Optimizer if layout.zero1 else MasterWeightsOptimizer
        self.optimizer: Any = wrapper(self.params, optimizer_class)
        rows, columns = layout.micro_batch * layout.num_microbatches, layout.seq_len // layout.cp
        vocab = config.get_text_config().vocab_size
        ids = torch.randint(0, vocab, (rows, columns), generator=torch.Generator().manual_seed(0)).to(device)
        self.inputs = {"input_ids": ids, "labels": ids}
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
        times = [self._timed() for _ in range(steps)]
        held = [*self.model.local_parameters(), *self.model.local_buffers(), *self.inputs.values()]
        for master, state in self.optimizer.base_optimizer.state.items():
            held += [master, *(value for value in state.values() if isinstance(value, torch.Tensor))]
        gc.collect()  # what waits for the collector would count
        with measure_peak(held=held) as meter:
            self.step()
        ranks: Any = comm.gather_objects((times, meter.peak), "world")
        walls, cpus = ([[step[part] for step in rank[0]] for rank in ranks] for part in (0, 1))
        return Measured(
            tuple(map(max, zip(*walls, strict=True))),
            tuple(map(sum, zip(*cpus, strict=True))),
            max(r[1] for r in ranks),
        )

    def _timed(self) -> tuple[float, float]:
        """Returns the wall and CPU seconds of a step that all ranks begin together."""
        device_type = comm.current().backend.device.type
        comm.barrier("world")
        synchronize(device_type)
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        synchronize(device_type)
        return time.perf_counter() - wall, time.process_time() - cpu


# --- calibration -----------------------------------------------------------------------------------------------------

PRIOR = 0.02  # weight of a factor's squared logarithm beside one observation's: what no observation shows stays


def calibrated(
    cluster: Cluster, predict: Callable[[Cluster, Any], float], observed: Sequence[tuple[Any, float]]
) -> Cluster:
    """Returns the cluster with its speeds scaled so that predictions fit observed steps.

    The factors of products, memory, calls, and of each link's bandwidth and latencies minimize the squared relative
    errors (of logarithms), with a weak preference of 1. They are positive, and achieved speeds stay below the peak.

    Args:
        predict: returns the predicted seconds of a case on a cluster.
        observed: cases and their measured seconds.
    """
    knobs = _knobs(cluster)
    factors = torch.zeros(len(knobs), dtype=torch.float64)

    def errors(at: torch.Tensor) -> torch.Tensor:
        scaled = _scaled(cluster, dict(zip(knobs, at.tolist())))
        return torch.tensor([log(predict(scaled, case) / seconds) for case, seconds in observed], dtype=torch.float64)

    def loss(values: torch.Tensor, at: torch.Tensor) -> float:
        return float(values.square().sum() + PRIOR * at.square().sum())

    now, damping, move = errors(factors), 0.1, 1e-3
    for _ in range(40):
        columns = [(errors(factors + move * unit) - now) / move for unit in torch.eye(len(knobs), dtype=torch.float64)]
        jacobian = torch.stack(columns, dim=1)
        gradient = jacobian.T @ now + PRIOR * factors
        curvature = jacobian.T @ jacobian + (PRIOR + damping) * torch.eye(len(knobs), dtype=torch.float64)
        candidate = factors - torch.linalg.solve(curvature, gradient).clamp(-1, 1)
        then = errors(candidate)
        if loss(then, candidate) < loss(now, factors):
            gain = loss(now, factors) - loss(then, candidate)
            factors, now, damping = candidate, then, damping / 3
            if gain < 1e-9:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return _scaled(cluster, dict(zip(knobs, factors.tolist())))


def _knobs(cluster: Cluster) -> list[str]:
    links = range(len(cluster.links))
    return ["flops", "bandwidth", "launch", *(f"{name}{i}" for i in links for name in ("link", "latency"))]


def _scaled(cluster: Cluster, logs: dict[str, float]) -> Cluster:
    """Returns the cluster with speeds multiplied by exp(logs), and latencies too."""
    factors = {name: exp(max(-5.0, min(5.0, value))) for name, value in logs.items()}
    bandwidth = cluster.bandwidth * factors["bandwidth"]
    links = tuple(
        replace(
            link,
            bandwidth=min(link.bandwidth * factors[f"link{i}"], bandwidth),
            latency=link.latency * factors[f"latency{i}"],
            in_step=link.in_step * factors[f"latency{i}"],
        )
        for i, link in enumerate(cluster.links)
    )
    flops = {dtype: min(one * factors["flops"], cluster.peak[dtype]) for dtype, one in cluster.flops.items()}
    return replace(cluster, flops=flops, bandwidth=bandwidth, launch=cluster.launch * factors["launch"], links=links)

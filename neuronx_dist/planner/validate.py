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
from collections.abc import Callable, Mapping, Sequence
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
from .cluster import Cluster, Link

__all__ = ["Measured", "TrainingJob", "calibrated", "fit_factors", "mape", "rank_correlation", "regret", "scaled"]


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

    def timed(self) -> tuple[float, float]:
        """Returns the wall and CPU seconds of a step that all ranks begin together."""
        device_type = comm.current().backend.device.type
        comm.barrier("world")
        synchronize(device_type)
        wall, cpu = time.perf_counter(), time.process_time()
        self.step()
        synchronize(device_type)
        return time.perf_counter() - wall, time.process_time() - cpu


# --- calibration -----------------------------------------------------------------------------------------------------

SPEEDS = ("flops", "attention", "bandwidth", "launch")
LINK_SPEEDS = ("bandwidth", "latency")
PRIOR = 0.02  # weight of a factor's squared logarithm beside one observation's: what no observation shows stays


def calibrated(
    cluster: Cluster, predict: Callable[[Cluster, Any], float], observed: Sequence[tuple[Any, float]]
) -> Cluster:
    """Returns the cluster with its speeds scaled so that predictions fit observed steps.

    Args:
        predict: returns the predicted seconds of a case on a cluster.
        observed: cases and their measured seconds.
    """
    return scaled(cluster, fit_factors(lambda factors, case: predict(scaled(cluster, factors), case), observed))


def fit_factors(
    predict: Callable[[Mapping[str, float], Any], float], observed: Sequence[tuple[Any, float]], *, links: int = 4
) -> dict[str, float]:
    """Returns factors of speeds with which predictions fit observed steps; see `scaled`.

    They minimize the squared relative errors (of logarithms), with a weak preference of 1 (Levenberg's and Marquardt's
    method): factors are positive, and what no step shows stays 1.

    Args:
        predict: returns the predicted seconds of a case with these factors.
        links: number of links that have factors.
    """
    names = [*SPEEDS, *(f"{name}[{link}]" for link in range(links) for name in LINK_SPEEDS)]
    units = torch.eye(len(names), dtype=torch.float64)

    def factors_at(logs: torch.Tensor) -> dict[str, float]:
        return {name: exp(max(-5.0, min(5.0, value))) for name, value in zip(names, logs.tolist())}

    def errors(logs: torch.Tensor) -> torch.Tensor:
        factors = factors_at(logs)
        return torch.tensor([log(predict(factors, case) / seconds) for case, seconds in observed], dtype=torch.float64)

    def loss(values: torch.Tensor, logs: torch.Tensor) -> float:
        return float(values.square().sum() + PRIOR * logs.square().sum())

    logs, damping, move = torch.zeros(len(names), dtype=torch.float64), 0.1, 1e-3
    now = errors(logs)
    while damping < 1e6:
        jacobian = torch.stack([(errors(logs + move * unit) - now) / move for unit in units], dim=1)
        gradient = jacobian.T @ now + PRIOR * logs
        candidate = logs - torch.linalg.solve(jacobian.T @ jacobian + (PRIOR + damping) * units, gradient).clamp(-1, 1)
        then = errors(candidate)
        gain = loss(now, logs) - loss(then, candidate)
        if gain > 0:
            logs, now, damping = candidate, then, damping / 3
            if gain < 1e-7:
                break
        else:
            damping *= 4
    return factors_at(logs)


def scaled(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Returns the cluster with its speeds multiplied by factors; products stay below the peak, links below the memory.

    Args:
        factors: by name, of `SPEEDS`, and of `LINK_SPEEDS` of a link, as "bandwidth[0]"; missing ones are 1. The factor
            of "latency" is that of `Link.in_step` too.
    """
    bandwidth = cluster.bandwidth * factors.get("bandwidth", 1.0)
    links = []
    for number, link in enumerate(cluster.links):
        faster, longer = (factors.get(f"{name}[{number}]", 1.0) for name in LINK_SPEEDS)
        speed = min(link.bandwidth * faster, bandwidth)
        links.append(Link(link.span, speed, link.latency * longer, link.in_step * longer))
    return replace(
        cluster,
        flops={dtype: min(x * factors.get("flops", 1.0), cluster.peak[dtype]) for dtype, x in cluster.flops.items()},
        attention=cluster.attention * factors.get("attention", 1.0),
        bandwidth=bandwidth,
        launch=cluster.launch * factors.get("launch", 1.0),
        links=tuple(links),
    )

"""End2end modules trained as pipelines on threads, and in one process, which adds up the gradients of all samples."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, ParallelModule, build_optimizer, parallelize
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support.models import BATCH, LENGTH, VOCABULARY, WIDTH, Gpt, Mlp, Skip

Sample = dict[str, torch.Tensor]


class GptSample(Gpt):
    """A GPT on one sample; logits beside the loss, and values that are no tensors."""

    def forward(self, data: Sample) -> dict[str, Any]:  # type: ignore[override]
        return {"loss": super().forward(data["tokens"], data["labels"]), "mask": (data["labels"] < 0, "name")}


class Even(nn.Module):
    """Two linear layers whose dims two ranks divide, but not four."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, data: Sample) -> torch.Tensor:
        return self.down(torch.relu(self.up(data["x"]))).square().mean()


def even_sample(generator: torch.Generator) -> Sample:
    return {"x": torch.randn(2, 6, generator=generator).double()}


def mlp_sample(generator: torch.Generator) -> Sample:
    return {
        "data": torch.randn(BATCH, WIDTH, generator=generator).double(),
        "target": torch.rand(BATCH, WIDTH, generator=generator).double(),
    }


def gpt_sample(generator: torch.Generator) -> Sample:
    tokens, labels = (torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    return {"tokens": tokens, "labels": labels}


def skip_sample(generator: torch.Generator) -> Sample:
    sample = mlp_sample(generator)
    return {"x": sample["data"], "target": sample["target"]}


MODULES: dict[str, tuple[type[nn.Module], Callable[[torch.Generator], Sample]]] = {
    "mlp": (Mlp, mlp_sample),
    "gpt": (GptSample, gpt_sample),
    "skip": (Skip, skip_sample),
    "even": (Even, even_sample),
}


_SGD = partial(torch.optim.SGD, lr=0.1)


def module(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODULES[name][0]().double()


def samples(name: str, count: int, step: int = 0, unit: int = 0) -> list[Sample]:
    generator = torch.Generator().manual_seed(100 * step + unit)
    return [MODULES[name][1](generator) for _ in range(count)]


def config(
    plan: int, units: int = 1, *, micro: int = 4, zero: bool = False, reducer: bool = False, **options: Any
) -> ComputeConfig:
    pas = {"pipeline_nmicros": micro, **options}
    return ComputeConfig(plan, plan * units, use_end2end=True, use_zero=zero, use_async_reducer=reducer, pas_config=pas)


class Run(NamedTuple):
    """Results of training.

    Attributes:
        results: of the first step, of each sample of each unit.
        gradients: of the first step; None: that parameter has none.
        norms: of all gradients, of each step.
        weights: the state dict at the end.
    """

    results: list[Any]
    gradients: dict[str, torch.Tensor | None]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def accumulated(name: str, optimizer: Callable[..., Any], steps: int, units: int, micro: int = 4) -> Run:
    """In one process."""
    whole = module(name)
    stepper = optimizer(whole.parameters())
    run = Run([], {}, [], {})
    for step in range(steps):
        whole.zero_grad()
        for unit in range(units):
            for sample in samples(name, micro, step, unit):
                result = whole(sample)
                loss = first(result)
                loss.backward()
                if not step:
                    run.results.append(result)
        if not step:
            run.gradients.update({n: None if p.grad is None else p.grad.clone() for n, p in whole.named_parameters()})
        run.norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0)))
        stepper.step()
    run.weights.update(copy.deepcopy(whole.state_dict()))
    return run


def pipelined(
    name: str, optimizer: Callable[..., Any], steps: int, config: ComputeConfig, ranks: int, folder: Path, policy: Any
) -> list[Run]:
    """On threads: of each rank, with the gradients and weights that it holds, whole."""
    return threads.run(config.mesh(ranks), lambda: on_rank(name, optimizer, steps, config, folder, policy))


def on_rank(
    name: str, optimizer: Callable[..., Any], steps: int, config: ComputeConfig, folder: Any, policy: Any
) -> Run:
    given = samples(name, 1)[0]
    parallel = parallelize(module(name), {"data": given}, policy, config, gen_savedir=folder)
    assert isinstance(parallel, ParallelModule)
    stepper = build_optimizer(parallel, optimizer)
    micro, unit = config.pas_config["pipeline_nmicros"], comm.rank("dp")
    run = Run([], {}, [], {})
    for step in range(steps):
        results = parallel.train_step(samples(name, micro, step, unit))
        if not step:
            run.results.extend(results)
            for parameter_name, p in parallel.named_parameters():
                grad = None if p.grad is None else comm.all_reduce(p.grad, "dp")
                run.gradients[parameter_name] = None if grad is None else gather_full(grad, spec_of(p)).clone()
        run.norms.append(float(stepper.clip_gnorm(1.0)))
        stepper.step()
    held = dict(parallel.named_parameters(remove_duplicate=False))
    for parameter_name, x in parallel.state_dict().items():
        run.weights[parameter_name] = (
            gather_full(x, spec_of(held[parameter_name])).clone() if parameter_name in held else x.clone()
        )
    return run


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


def tied_step() -> None:
    """A step of two stages that share the embedding."""
    has = pipelined("gpt", _SGD, 1, config(2, micro=2), 2, Path(_folder().name), "pp")
    assert_same(has, accumulated("gpt", _SGD, 1, 1, micro=2), 1)


def first(result: Any) -> torch.Tensor:
    """The loss: the first result."""
    while not isinstance(result, torch.Tensor):
        result = next(iter(result.values() if isinstance(result, dict) else result))
    return result


def assert_same(has: list[Run], wanted: Run, units: int, tolerance: float = 1e-9) -> None:
    """Every rank's results, gradients, norms and weights; and together the ranks hold everything."""
    names = {name for run in has for name in run.weights}
    assert names == set(wanted.weights)
    per_unit, per_sample = len(has) // units, len(wanted.results) // units
    counted = {name for name in names if units > 1 and ("running" in name or "tracked" in name)}  # each unit's own
    for rank, run in enumerate(has):
        unit = rank // per_unit
        close(run.results, wanted.results[unit * per_sample : (unit + 1) * per_sample], tolerance)
        close(run.gradients, {name: wanted.gradients[name] for name in run.gradients}, tolerance)
        # A rank without parameters has the norm in float32.
        close(run.norms, wanted.norms, tolerance if run.gradients else 1e-6)
        mine = {name: x for name, x in run.weights.items() if name not in counted}
        close(mine, {name: wanted.weights[name] for name in mine}, tolerance)


def close(has: Any, wanted: Any, tolerance: float) -> None:
    flat, structure = torch.utils._pytree.tree_flatten(has)
    other, expected = torch.utils._pytree.tree_flatten(wanted)
    assert structure == expected
    for x, y in zip(flat, other, strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y.detach(), rtol=tolerance, atol=tolerance)
        elif isinstance(x, float):
            assert abs(x - y) <= tolerance * max(abs(y), 1.0), (x, y)
        else:
            assert x == y


__all__ = [
    "MODULES", "Run", "accumulated", "assert_same", "close", "config", "first", "module", "on_rank", "pipelined",
    "samples",
    "tied_step",
]  # fmt: skip

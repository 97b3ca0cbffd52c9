"""Steps of a small model, with each optimizer: by torch alone in one process, and on the stages of a pipeline.

Three steps, so that the second one has momentum and the third the second one's update of it; NXD_FULL=1 takes five.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import grads
from neuronx_dist.pipeline import NxDPPModel
from neuronx_dist.weights.partial_model import join
from tests.support.pipeline_models import Block, Model, batch, cut, error, make

__all__ = ["CHUNKS", "OPTIMIZERS", "STEPS", "Setting", "Steps", "alone", "check", "train", "train_on_threads"]

STEPS = 5 if os.environ.get("NXD_FULL") else 3
CHUNKS = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "interleaved": 2, "zb_v": 2}  # of each schedule
OPTIMIZERS: dict[str, Any] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, eps=1e-6, weight_decay=0.1),
}


@dataclass(frozen=True)
class Setting:
    """Settings of a model's training; the first four fields must change nothing."""

    schedule: str
    pp: int
    microbatches: int
    chunks: int = 0  # 0: as many as the schedule has
    tied: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def num_chunks(self) -> int:
        return self.chunks or CHUNKS[self.schedule]

    @property
    def layers(self) -> int:
        """One more than there are pieces of the model, so that these differ in size."""
        return self.pp * self.num_chunks + 1

    def __str__(self) -> str:
        words = [self.schedule, f"pp{self.pp}", f"mb{self.microbatches}"] + [f"x{self.chunks}"] * (self.chunks > 0)
        return "-".join(words + ["tied"] * self.tied + ["fp32"] * (self.dtype == torch.float32))


@dataclass
class Steps:
    """Results of training, by step; tensors by all the names that they have in the whole model."""

    losses: list[torch.Tensor]
    norms: list[torch.Tensor]
    gradients: list[dict[str, torch.Tensor]]
    weights: dict[str, torch.Tensor]


def initial_model(layers: int, tied: bool, dtype: torch.dtype) -> nn.Module:
    """The same every time; biases and the weights of norms are not the trivial ones."""
    model = make(functools.partial(Model, layers=layers, tied=tied))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model.to(dtype)


def inputs(setting: Setting, step: int) -> dict[str, torch.Tensor]:
    return batch(rows=2 * setting.microbatches, seed=step)


@functools.lru_cache(maxsize=64)
def _alone(order: tuple[int, ...], layers: int, tied: bool, dtype: torch.dtype, optimizer_name: str) -> Steps:
    model: Any = initial_model(layers, tied, dtype)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    microbatches = len(order)
    result = Steps([], [], [], {})
    for step in range(STEPS):
        losses = [model(**piece) for piece in cut(batch(rows=2 * microbatches, seed=step), microbatches)]
        for microbatch in order:
            (losses[microbatch] / microbatches).backward()
        result.losses.append(torch.stack(losses).mean().detach())
        result.norms.append(nn.utils.get_total_norm([param.grad for param in model.parameters()]))
        named = list(model.named_parameters(remove_duplicate=False))
        result.gradients.append({name: param.grad.clone() for name, param in named})
        optimizer.step()
        optimizer.zero_grad()
    result.weights = {name: param.detach() for name, param in named}
    return result


def alone(setting: Setting, optimizer_name: str) -> Steps:
    """In one process: microbatches accumulate, in their order, or for GPipe the last one first."""
    order = range(setting.microbatches)
    order = order[::-1] if setting.schedule == "gpipe" else order
    return _alone(tuple(order), setting.layers, setting.tied, setting.dtype, optimizer_name)


def train(setting: Setting, optimizer_names: tuple[str, ...] = tuple(OPTIMIZERS)) -> dict[str, Steps]:
    """Returns this rank's results, by optimizer."""
    pipeline = NxDPPModel(
        initial_model(setting.layers, setting.tied, setting.dtype),
        transformer_layer_cls=Block,
        num_microbatches=setting.microbatches,
        virtual_pipeline_size=setting.num_chunks,
        output_loss_value_spec=True,
        auto_partition=True,
        broadcast_and_average_loss=True,
        schedule=setting.schedule,
    )
    start = {name: param.detach().clone() for name, param in pipeline.local_named_parameters()}
    results = {}
    for optimizer_name in optimizer_names:
        named = list(pipeline.local_named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, value in start.items():
                pipeline.get_parameter(join("original_module", name)).copy_(value)
        optimizer = OPTIMIZERS[optimizer_name](pipeline.local_parameters())
        result = results[optimizer_name] = Steps([], [], [], {})
        for step in range(STEPS):
            loss = pipeline.run_train(**inputs(setting, step))
            assert isinstance(loss, torch.Tensor)
            result.losses.append(loss)
            result.norms.append(grads.clip_grad_norm(pipeline.local_parameters(), math.inf))
            result.gradients.append({name: param.grad.clone() for name, param in named if param.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        result.weights = {name: param.detach().clone() for name, param in named}
    return results


def differences(setting: Setting, results: list[dict[str, Steps]]) -> Iterator[tuple[str, float]]:
    """Yields each rank's distance from one process, ||a - b|| / ||b||, by figure; every parameter is on a rank."""
    for optimizer_name in results[0]:
        expected = alone(setting, optimizer_name)
        trained: set[str] = set()
        for rank, result in enumerate(steps[optimizer_name] for steps in results):
            for step in range(STEPS):
                where = f"of step {step} ({optimizer_name}, rank {rank})"
                yield f"loss {where}", error(result.losses[step], expected.losses[step])
                yield f"norm {where}", error(result.norms[step], expected.norms[step])
                assert result.gradients[step].keys() == result.weights.keys()
                for name, grad in result.gradients[step].items():
                    yield f"gradient of {name} {where}", error(grad, expected.gradients[step][name])
            for name, weight in result.weights.items():
                yield f"{name} ({optimizer_name}, rank {rank})", error(weight, expected.weights[name])
            trained |= result.weights.keys()
        assert trained == expected.weights.keys()


def check(setting: Setting, results: list[dict[str, Steps]]) -> None:
    """Losses, norms, all gradients of each step and the weights after the last are those of one process."""
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5}[setting.dtype]
    what, worst = max(differences(setting, results), key=lambda item: item[1])
    assert worst < tolerance, f"{setting}: {what} differs by {worst:.2e} from one process"


def train_on_threads(
    setting: Setting, optimizer_names: tuple[str, ...] = tuple(OPTIMIZERS), **options: Any
) -> list[dict[str, Steps]]:
    return comm.threads.run(Mesh(setting.pp, pp=setting.pp), train, setting, optimizer_names, **options)

"""Training emitted modules on threads, and their originals in one process, on the sum of the units' losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.parallelize.prove.emitted import imported
from neuronx_dist.parallelize.train.stored import stored_of
from neuronx_dist.spmd import I
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support.by_hand import WIDTH, pair

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)

Class = Callable[..., Any]


class Parent(nn.Module):
    """A plain layer before a module, and one beside it."""

    def __init__(self, inner: nn.Module, second: nn.Module | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.before = nn.Linear(WIDTH, WIDTH, bias=False).double()
        self.inner = inner
        if second is not None:
            self.second = second
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))
        with torch.no_grad():
            self.before.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator).double() / 3)

    def forward(self, data: dict[str, torch.Tensor]) -> dict[str, Any]:
        data = {**data, "x": self.before(data["x"]) * self.scale}
        result = self.inner(data)
        if hasattr(self, "second"):
            result = {"loss": result["loss"] + self.second(data)["loss"]}
        return result


def batch(step: int, unit: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + unit)
    return {name: torch.randn(4, WIDTH, generator=generator).double() for name in ("x", "target")}


def original(parent: str = "") -> nn.Module:
    """`Pair`, alone ("") or in a parent ("parent", "two")."""
    module = pair(1)[0]
    if not parent:
        return module
    return Parent(module, _second() if parent == "two" else None)


def _second() -> nn.Module:
    module = pair(1)[0]
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(0.5)
    return module


@contextmanager
def parallel(config: ComputeConfig, parent: str = "") -> Iterator[Callable[[], nn.Module]]:
    """Returns a function that makes the parallel form of `original(parent)`, on a rank."""
    module, division, _ = pair(config.plan_ngpus)
    if parent:  # the input has a gradient, which is whole on every rank
        x = division.program.inputs[0]
        division.types[x], x.requires_grad = I, True
    if "tp_size" in config.pas_config:
        division = divide(division.program, "tp", config)
    source = emit(division, name="Pair", stored=stored_of(module, division))
    with imported(source, config.plan_ngpus, module.state_dict(), config=config) as cls:

        def make() -> nn.Module:
            if not parent:
                return cls()
            inner, second = cls(), None
            if parent == "two":
                second = cls()
                with torch.no_grad():
                    for param in second.parameters():
                        param.mul_(0.5)
            return Parent(inner, second)

        yield make


def loss_of(module: nn.Module, data: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = module(data)["loss"]
    return loss


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    """All weights of a module, gathered."""
    return {name: gather_full(param, spec_of(param)).clone() for name, param in module.named_parameters()}


def one_process(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    units: int,
    max_norm: float | None = None,
) -> tuple[list[float], list[float]]:
    """Trains in one process: losses, and norms of gradients."""
    losses, norms = [], []
    for step in steps:
        loss = torch.stack([loss_of(module, batch(step, unit)) for unit in range(units)]).sum()
        loss.backward()
        bound = float("inf") if max_norm is None else max_norm
        norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), bound)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def one_rank(
    module: nn.Module, optimizer: Any, steps: range, max_norm: float | None = None
) -> tuple[list[float], list[float]]:
    """Trains on a rank: losses, summed over the units, and norms of gradients."""
    losses, norms = [], []
    for step in steps:
        loss = loss_of(module, batch(step, comm.rank("dp")))
        loss.backward()
        norms.append(float(optimizer.clip_gnorm(max_norm)))
        losses.append(float(comm.all_reduce(loss.detach(), "dp")))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def clone(x: Any) -> Any:
    return copy.deepcopy(x)

"""A module trained in one process, and by `parallelize` on threads: losses, gradients and weights, side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, ParallelModule, build_optimizer, parallelize
from neuronx_dist.weights.shard_spec import gather_full, spec_of

Optimizer = Callable[..., torch.optim.Optimizer]


class Trained(NamedTuple):
    """Results of a training run, whole.

    Attributes:
        losses: of each step and unit.
        gradients: of the first step, by name; None: that parameter has none.
        weights: the state dict at the end.
    """

    losses: list[list[float]]
    gradients: dict[str, torch.Tensor | None]
    weights: dict[str, torch.Tensor]


def batch(arguments: Mapping[str, Any], step: int, unit: int) -> dict[str, Any]:
    """Other arguments of the same shapes."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        values = x.detach().roll(step + 3 * unit, -1) if x.dim() else x.detach()
        return values.clone().requires_grad_(x.requires_grad)

    return pytree.tree_map_only(torch.Tensor, moved, dict(arguments))


def loss_of(result: Any) -> torch.Tensor:
    """The loss among a module's results; of one without, the means of their squares, added up."""
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return tensors[0] if not tensors[0].dim() else sum(x.pow(2).mean() for x in tensors)


def trained(module: nn.Module, arguments: Mapping[str, Any], optimizer: Optimizer, steps: int, units: int) -> Trained:
    """Trains a copy of the module in one process, on the batches of all units, whose gradients are summed."""
    module = copy.deepcopy(module)
    stepper = optimizer(module.parameters())
    losses, gradients = [], {}
    for step in range(steps):
        module.zero_grad()
        losses.append([])
        for unit in range(units):
            loss = loss_of(module(**batch(arguments, step, unit)))
            loss.backward()
            losses[-1].append(loss.item())
        if not step:
            gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
        stepper.step()
    return Trained(losses, gradients, {name: x.detach().clone() for name, x in module.state_dict().items()})


def trained_parallel(
    module: nn.Module,
    arguments: Mapping[str, Any],
    optimizer: Optimizer,
    steps: int,
    config: ComputeConfig,
    policy: Any,
    folder: Path,
) -> Trained:
    """The same by `parallelize`, on threads."""
    world, units = config.world_size, config.units

    def rank() -> tuple[list[float], Trained]:
        parallel = parallelize(module, dict(arguments), policy, config, gen_savedir=folder)
        assert isinstance(parallel, ParallelModule)
        stepper = build_optimizer(parallel, optimizer)
        losses: list[list[float]] = []
        gradients: dict[str, torch.Tensor | None] = {}
        for step in range(steps):
            given = batch(arguments, step, comm.rank("dp"))
            if config.use_end2end:
                (sample,) = given.values()
                loss = loss_of(parallel.train_step(sample))
            else:
                stepper.zero_grad()
                loss = loss_of(parallel(**given))
                loss.backward()
            stepper.sync_shard_grad()
            losses.append(comm.gather_objects(loss.item())[:: config.plan_ngpus])
            if not step:
                gradients = {
                    name: None if p.grad is None else gather_full(p.grad, spec_of(p)).clone()
                    for name, p in parallel.named_parameters()
                }
            stepper.step()
        names = dict(parallel.named_parameters(remove_duplicate=False))
        weights = {
            name: gather_full(x, spec_of(names[name])).clone() if name in names else x.clone()
            for name, x in parallel.state_dict().items()
        }
        return Trained(losses, gradients, weights)

    ranks = threads.run(Mesh(world, tp=config.plan_ngpus), rank)
    for other in ranks[1:]:
        assert_equal(other, own_statistics(ranks[0], other, units), 1e-12)
    return ranks[0]


def assert_equal(has: Trained, wanted: Trained, tolerance: float) -> None:
    """Every loss, gradient and weight by itself, relative to its norm."""
    torch.testing.assert_close(torch.tensor(has.losses), torch.tensor(wanted.losses), rtol=tolerance, atol=tolerance)
    for found, other in ((has.gradients, wanted.gradients), (has.weights, wanted.weights)):
        assert list(found) == list(other)
        scale = max((float(x.double().norm()) for x in other.values() if x is not None), default=0.0)
        for name, x in other.items():
            y = found[name]
            assert (x is None) == (y is None), name
            if x is not None and y is not None:
                assert (x.shape, x.dtype) == (y.shape, y.dtype), name
                error = float((x.double() - y.double()).norm()) / max(float(x.double().norm()), 1e-6 * scale, 1e-30)
                assert error <= tolerance, f"{name}: {error:.2g}"


def own_statistics(wanted: Trained, has: Trained, units: int) -> Trained:
    """Returns `wanted` with the found statistics of batch norm, which differ between units: not compared."""
    statistics = {name for name in has.weights if units > 1 and ("running" in name or "tracked" in name)}
    return wanted._replace(weights={n: has.weights[n] if n in statistics else x for n, x in wanted.weights.items()})

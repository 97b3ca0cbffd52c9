"""ZeRO-1 around a torch optimizer that exists already, and its schedulers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR

from ..optimizer import NeuronZero1Optimizer
from ..torch_internals.modules import inner_schedulers

__all__ = ["use_zero1"]


def use_zero1(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any] = ()) -> NeuronZero1Optimizer:
    """Makes a `NeuronZero1Optimizer` whose base is this optimizer, and which its schedulers then set.

    It does not clip, as long as nobody sets its `grad_clipping`.

    Args:
        optimizer: one with an elementwise update, or Muon, that has made no step; it gets shards for its parameters.
        schedulers: of this optimizer.

    Raises:
        ValueError: the optimizer has state already, or its update is not elementwise.
    """
    if optimizer.state:
        raise ValueError(
            f"{type(optimizer).__name__} has state of its parameters before the first step, which ZeRO-1 cannot "
            "divide: pass zero1=False, or return an optimizer without state"
        )

    def with_shards(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        for group, sharded in zip(optimizer.param_groups, groups):
            group["params"] = sharded["params"]
        return optimizer

    sharded = NeuronZero1Optimizer([{**group} for group in optimizer.param_groups], with_shards, grad_clipping=False)
    for scheduler in schedulers:
        _set_optimizer(scheduler, optimizer, sharded)
    ConstantLR(sharded, factor=1.0, total_iters=0)  # marks `step`, which schedulers warn about otherwise
    return sharded


def _set_optimizer(scheduler: Any, before: Any, after: Any) -> None:
    """Makes a scheduler, and those inside of it, set the groups of another optimizer."""
    for inner in inner_schedulers(scheduler):
        _set_optimizer(inner, before, after)
    if getattr(scheduler, "optimizer", None) is before:
        scheduler.optimizer = after

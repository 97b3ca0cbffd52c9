"""Refusal of torch's own clipping and optimizers, where the gradients of one rank are not enough for them.

`torch.nn.utils.clip_grad_norm_` takes the norm of this rank's shards, so that each rank scales by another factor.
A torch optimizer in a step whose mean over the data was left to ZeRO-1 (`NxDPPModel(use_zero1_optimizer=True)`,
`reduce_gradients(average_over_data=False)`) makes the weights of data-parallel ranks drift apart.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import comm
from ..spmd.watching import active
from ..torch_internals.modules import before_clipping
from .elementwise import refuse_not_elementwise
from .gradient import DATA_AXES, gradient_of
from .state import ReductionState

__all__ = ["watch_clipping", "watch_optimizers"]


@functools.cache
def watch_clipping() -> None:
    """Makes `torch.nn.utils.clip_grad_norm_` refuse, from now on, gradients of a model that is spread over ranks."""
    before_clipping(_check_clipping)


@functools.cache
def watch_optimizers() -> None:
    """Makes optimizers refuse, from now on, gradients that are not averaged over the data.

    Those whose update is not elementwise refuse shards too. An optimizer whose `step` averages gradients itself has
    an attribute `averages_over_data` that is true.
    """
    register_optimizer_step_pre_hook(_check_step)


def _check_clipping(parameters: Sequence[torch.Tensor]) -> None:
    if not comm.is_initialized():
        return
    stages, num_shards = _stages(parameters), _shards([param for param in parameters if param.grad is not None])
    if num_shards > 1:
        why = f"gradients are shards, of {num_shards}"
    elif "step" in stages and comm.size("pp") > 1:
        why = f"the model has {comm.size('pp')} pipeline stages"
    elif _is_left_to_zero1(stages):
        why = f"gradients are not averaged over the {comm.size(DATA_AXES)} data-parallel ranks: ZeRO-1 does that"
    else:
        return
    how = "pass max_norm to NeuronZero1Optimizer, or " if _is_left_to_zero1(stages) else ""
    raise RuntimeError(
        "torch.nn.utils.clip_grad_norm_ takes the norm of this rank's gradients, so that each rank would scale its "
        f"gradients by another factor ({why}; {comm.current().mesh}): {how}call neuronx_dist.clip_grad_norm("
        "parameters, max_norm), which takes the whole model's norm, after reduce_gradients or run_train"
    )


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "averages_over_data", False) or not comm.is_initialized() or active() is not None:
        return  # the active checker says more, with the line that left the mean out
    for group in optimizer.param_groups:
        if _is_left_to_zero1(_stages(group["params"])):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: the gradients are not averaged over the {comm.size(DATA_AXES)} "
                "data-parallel ranks, because the optimizer was to do that (use_zero1_optimizer=True, or "
                "reduce_gradients(average_over_data=False)), so that each of them would get other weights: use "
                "NeuronZero1Optimizer, or leave these options out"
            )
        if _shards(group["params"]) > 1 and not isinstance(optimizer, torch.optim.SparseAdam):
            refuse_not_elementwise(type(optimizer), advice=" for a model with tensor-parallel shards")


def _shards(parameters: Sequence[torch.Tensor]) -> int:
    """Returns the largest number of shards of a parameter; 1: all are whole."""
    return max((getattr(param, "num_partitions", 1) for param in parameters), default=1)


def _stages(parameters: Sequence[torch.Tensor]) -> frozenset[str]:
    """Returns the reductions that the first gradient has been through: one call reduces all of a model's."""
    grads = map(gradient_of, parameters)
    first = next((grad for grad in grads if grad is not None), None)
    return frozenset() if first is None else ReductionState.of(first).stages


def _is_left_to_zero1(stages: frozenset[str]) -> bool:
    return "step" in stages and "data" not in stages and comm.size(DATA_AXES) > 1

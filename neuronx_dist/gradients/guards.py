"""Refusal of torch's own clipping and optimizers, where the gradients of one rank are not enough for them.

`torch.nn.utils.clip_grad_norm_` takes the norm of this rank's shards, so that ranks scale by different factors.
A torch optimizer in a step whose mean over the data was left to ZeRO-1 (`NxDPPModel(use_zero1_optimizer=True)`,
`reduce_gradients(average_over_data=False)`) makes the weights of data-parallel ranks drift apart; so does one whose
parameters are of a module of `parallelize` on several units, since only `build_optimizer` adds the sum over the units.
An optimizer whose gradients of a sequence-parallel model nothing here has summed over tp warns: a script may do it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .. import comm
from ..spmd.watching import active
from ..torch_internals.distributed import before_averaging
from ..torch_internals.modules import after_unscaling, before_clipping
from ..weights.shard_spec import spec_of
from ..weights.wrappers import check_group, note_saved_state, refuse_flattened
from .elementwise import refuse_not_elementwise
from .gradient import DATA_AXES, ParameterGradient, gradient_of
from .state import ReductionState, is_summed_over_units

__all__ = ["PartOfJob", "share_found_inf", "watch_clipping", "watch_module", "watch_optimizers"]


class PartOfJob(Protocol):
    """Protocol of a module with a gradient of one unit, or with some of the model's pipeline stages."""

    @property
    def num_units(self) -> int: ...

    @property
    def num_stages(self) -> int: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


_NOTES_STATE = "_nxd_notes_state"
_SAW_SUMS = "_nxd_saw_sums_over_tp"
_watched: WeakSet[Any] = WeakSet()


@functools.cache
def watch_clipping() -> None:
    """Makes `torch.nn.utils.clip_grad_norm_` refuse, from now on, gradients of a model that is spread over ranks."""
    before_clipping(_check_clipping)


@functools.cache
def watch_optimizers() -> None:
    """Makes optimizers refuse, from now on, gradients that are not averaged over the data.

    Optimizers whose update is not elementwise refuse shards too. An optimizer whose attribute `averages_over_data` is
    true averages in `step`, and is not refused. `torch.amp.GradScaler` skips a step on all ranks or on none.
    """
    register_optimizer_step_pre_hook(_check_step)
    after_unscaling(share_found_inf)


def watch_module(module: PartOfJob) -> None:
    """Makes clipping and plain optimizers refuse, from now on, gradients that are only a part of this module's."""
    watch_clipping()
    watch_optimizers()
    _watched.add(module)


def _check_clipping(parameters: Sequence[torch.Tensor]) -> None:
    if not comm.is_initialized():
        return
    refuse_flattened("torch.nn.utils.clip_grad_norm_", parameters)
    of_units = _watched_module(parameters)
    stages, num_shards = _stages(parameters), _shards([param for param in parameters if param.grad is not None])
    if num_shards > 1:
        why = f"gradients are shards, of {num_shards}"
    elif "step" in stages and comm.size("pp") > 1:
        why = f"the model has {comm.size('pp')} pipeline stages"
    elif _is_left_to_zero1(stages):
        why = f"gradients are not averaged over the {comm.size(DATA_AXES)} data-parallel ranks: ZeRO-1 does that"
    elif of_units is not None and of_units.num_stages > 1:
        why = f"the model has {of_units.num_stages} pipeline stages"
    elif of_units is not None and _are_of_one_unit(parameters, of_units):
        why = f"gradients are not summed over the {of_units.num_units} units"
    else:
        return
    if of_units is not None:
        raise RuntimeError(
            "torch.nn.utils.clip_grad_norm_ takes the norm of this rank's gradients, so that ranks would scale by "
            f"different factors ({why}; {comm.current().mesh}): call clip_gnorm(max_norm) of the optimizer "
            "that build_optimizer returns, which takes the norm of the model's gradients, summed over the units"
        )
    how = "pass max_norm to NeuronZero1Optimizer, or " if _is_left_to_zero1(stages) else ""
    raise RuntimeError(
        "torch.nn.utils.clip_grad_norm_ takes the norm of this rank's gradients, so that ranks would scale by "
        f"different factors ({why}; {comm.current().mesh}): {how}call neuronx_dist.clip_grad_norm("
        "parameters, max_norm), which takes the whole model's norm, after reduce_gradients or run_train"
    )


def _check_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if getattr(optimizer, "averages_over_data", False) or not comm.is_initialized() or active() is not None:
        return  # the active checker says more, with the line that left the mean out
    before_averaging(_check_averaging)
    if comm.size("tp") > 1 and _SAW_SUMS not in optimizer.__dict__:
        _look_for_sums_over_tp(optimizer)
    for group in optimizer.param_groups:
        if _is_left_to_zero1(_stages(group["params"])):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: the gradients are not averaged over the {comm.size(DATA_AXES)} "
                "data-parallel ranks, because that was left to the optimizer (use_zero1_optimizer=True, or "
                "reduce_gradients(average_over_data=False)), so that the weights of these ranks would differ: use "
                "NeuronZero1Optimizer, or leave these options out"
            )
        of_units = _watched_module(group["params"])
        if of_units is not None and _are_of_one_unit(group["params"], of_units):
            raise RuntimeError(
                f"{type(optimizer).__name__}.step: parameters are of a {type(of_units).__name__} on "
                f"{of_units.num_units} units, whose gradients are not summed, so that the weights of units "
                "would differ: make the optimizer by build_optimizer(module, optimizer_class), which sums them"
            )
        parts = _shards(group["params"]) > 1
        is_adamw = group.get("optimizer") == "adamw"  # of MuonAdamW
        process_group = getattr(optimizer, "process_group", None)  # of torch's ZeroRedundancyOptimizer
        if process_group is not None:
            _check_groups(type(optimizer).__name__, group["params"], process_group)
        if parts and _NOTES_STATE not in optimizer.__dict__:
            optimizer.__dict__[_NOTES_STATE] = optimizer.register_state_dict_post_hook(_note_state)
        if (parts or comm.size("pp") > 1) and not is_adamw and not isinstance(optimizer, torch.optim.SparseAdam):
            advice = " for a model with tensor-parallel shards" if parts else " for a pipeline"
            refuse_not_elementwise(type(optimizer), parts=parts, advice=advice)


def _look_for_sums_over_tp(optimizer: torch.optim.Optimizer) -> None:
    """Warns, in the first step with gradients, of those that are partial over tp, and that nothing has reduced."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, param in enumerate(params):
        grad = gradient_of(param)
        if grad is None:
            continue
        optimizer.__dict__[_SAW_SUMS] = True
        if ParameterGradient(param).is_partial_over_tp and not ReductionState.has_been_on(grad):
            warnings.warn(
                f"{type(optimizer).__name__}.step: the gradient of parameter {number} {tuple(param.shape)} is of this "
                "rank's part of the sequence or of the heads, and nothing seen here has summed it over the "
                f"{comm.size('tp')} tp ranks, whose weights would drift apart: call reduce_gradients(model) after "
                "backward, or use NxDOptimizer or NeuronZero1Optimizer, which do it. (A script that sums it by itself, "
                "or has put a new tensor into .grad since, is right)",
                stacklevel=4,
            )
            return


def _check_averaging(parameters: Sequence[torch.Tensor], process_group: Any) -> None:
    if comm.is_initialized():
        _check_groups("torch's model averaging", parameters, process_group)


def _check_groups(optimizer: str, parameters: Sequence[torch.Tensor], process_group: Any) -> None:
    for number, param in enumerate(parameters):
        check_group(optimizer, process_group, number, spec_of(param))


def _shards(parameters: Sequence[torch.Tensor]) -> int:
    """Returns the largest number of shards of a parameter; 1: all are whole."""
    return max((getattr(param, "num_partitions", 1) for param in parameters), default=1)


def _stages(parameters: Sequence[torch.Tensor]) -> frozenset[str]:
    """Returns the reductions that the first gradient has been through: one call reduces all gradients of a model."""
    grads = map(gradient_of, parameters)
    first = next((grad for grad in grads if grad is not None), None)
    return frozenset() if first is None else ReductionState.of(first).stages


def _is_left_to_zero1(stages: frozenset[str]) -> bool:
    return "step" in stages and "data" not in stages and comm.size(DATA_AXES) > 1


def share_found_inf(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Sets the flag of an infinite gradient on all ranks that make a step together, if one rank has set it."""
    if comm.is_initialized():
        axis = "world" if getattr(optimizer, "averages_over_data", False) else ("pp", "tp")
        comm.all_reduce(found_inf, axis, op="max", out=found_inf)


def _note_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Marks the states of shards in a state dict, which torch.distributed.checkpoint would save once for all ranks."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for number, param in enumerate(params) if _shards([param]) > 1]
    state = {number: state_dict["state"][number] for number in numbers if number in state_dict["state"]}
    note_saved_state(type(optimizer).__name__, state)


def _watched_module(parameters: Iterable[torch.Tensor]) -> PartOfJob | None:
    """Returns the watched module that has one of the parameters."""
    if not _watched:
        return None
    ids = {*map(id, parameters)}
    return next((module for module in [*_watched] if not ids.isdisjoint(map(id, module.parameters()))), None)


def _are_of_one_unit(parameters: Iterable[torch.Tensor], module: PartOfJob) -> bool:
    """Returns whether a gradient of a module is not summed over its units."""
    grads = [grad for param in parameters if (grad := gradient_of(param)) is not None]
    return module.num_units > 1 and not all(map(is_summed_over_units, grads))

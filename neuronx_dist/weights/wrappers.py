"""Refusal of wrappers and savers that take the shards of several ranks for copies, and of whole weights for a shard.

DistributedDataParallel and FSDP assume that all ranks of their group hold one model: they broadcast rank 0's
parameters, average gradients, or divide each parameter over the group. Over the data-parallel ranks that is so. Over
all ranks, which is their default and that of accelerate and of Hugging Face's Trainer, they would mix the shards of
tensor parallelism without any error, since all shards have one shape. Models that run by other methods than `forward`
(`run_train`, `train_step`) or sum gradients in another way are refused over any group: their classes say by the
attribute `instead_of_wrappers` how they reduce gradients. torch.distributed.checkpoint writes a plain tensor once for
all ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from .. import comm
from ..torch_internals.distributed import before_saving, is_flattened
from ..torch_internals.tensors import pytree
from .shard_spec import _TABLE, ShardSpec, named_specs

__all__ = [
    "TAKE_SHARDS",
    "check_group",
    "check_mesh",
    "note_saved",
    "note_saved_state",
    "refuse_flattened",
    "refuse_whole",
    "refuse_wrapper",
    "watch_wrappers",
    "wrapper_of",
]

_WRAPPERS = {
    "DistributedDataParallel": "DistributedDataParallel",
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",  # makes a module's class a subclass of this one
}
_EXPERTS = "{} has experts of one ep rank"
_EXPERTS_REPAIR = (
    "Leave the wrapper out: call neuronx_dist.reduce_gradients(model) after backward, or use NeuronZero1Optimizer; or "
    "keep all experts on every rank, by expert_model_parallel_size=1"
)
_REPAIR = (
    "Pass process_group=neuronx_dist.parallel_state.get_data_parallel_group(), or leave the wrapper out: call "
    "neuronx_dist.reduce_gradients(model) after backward, or use NeuronZero1Optimizer. accelerate.prepare(model) and "
    "Hugging Face's Trainer wrap a model over all ranks: use them at tensor and pipeline parallel size 1 (see "
    "docs/other-libraries.md)"
)

# By wrapper, what makes it take parameters that are ShardTensors, of these names: `(wrapper, module, names)`.
TAKE_SHARDS: dict[str, Callable[[nn.Module, nn.Module, Sequence[str]], None]] = {}
_saved_shards: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors in state dicts -> names


@functools.cache
def watch_wrappers() -> None:
    """Makes DistributedDataParallel and FSDP refuse, from now on, groups whose ranks hold different parameters."""
    register_module_module_registration_hook(_check)


def _check(wrapper: nn.Module, attribute: str, module: nn.Module | None) -> None:
    """Checks a group when its wrapper takes a module, before the wrapper communicates; torch calls it."""
    kind = wrapper_of(type(wrapper))
    if kind is None or module is None or not comm.is_initialized():
        return
    for child in module.modules():
        refuse_wrapper(kind, type(child))
    holders = [name for name, param in module.named_parameters() if getattr(type(param), "holds_local", False)]
    if holders and kind in TAKE_SHARDS:
        TAKE_SHARDS[kind](wrapper, module, holders)
    for name, param, spec in named_specs(module):
        expert = bool(getattr(param, "expert_model_parallel", False))
        if spec.num_partitions > 1 or expert:
            ranks = comm.communicator(wrapper.process_group).ranks
            part = _EXPERTS.format(name) if expert else f"{name} is one of {spec.num_partitions} shards"
            _refuse_parts(kind, ranks, part, _EXPERTS_REPAIR if expert else _REPAIR, expert)
            if kind == "FullyShardedDataParallel":  # its norm is that of the data-parallel ranks' pieces
                wrapper.__dict__["clip_grad_norm_"] = functools.partial(_refuse_norm, "clip_grad_norm_")
    for name, spec in _specs_without_parameters(module):
        if spec.num_partitions > 1:
            ranks = comm.communicator(wrapper.process_group).ranks
            _refuse_parts(kind, ranks, f"{name} is one of {spec.num_partitions} shards", _REPAIR)
            wrapper.__dict__["clip_grad_norm_"] = functools.partial(_refuse_norm, "clip_grad_norm_")


def _specs_without_parameters(module: nn.Module) -> Iterator[tuple[str, ShardSpec]]:
    """`(name, layout)` of parameters that are no longer in their modules: FSDP puts them into a flat one."""
    for prefix, child in module.named_modules():
        for name, spec in child.__dict__.get(_TABLE, {}).items():
            if name not in child._parameters:
                yield f"{prefix}.{name}" if prefix else name, spec


def wrapper_of(module_class: type) -> str | None:
    """Returns the name of the data-parallel wrapper that a class is, or None."""
    return next((_WRAPPERS[cls.__name__] for cls in module_class.__mro__ if cls.__name__ in _WRAPPERS), None)


def refuse_wrapper(wrapper: str | None, module_class: type) -> None:
    """Refuses a data-parallel wrapper around a module whose class has `instead_of_wrappers`.

    Raises:
        RuntimeError: the class has it; the message ends with its text.
    """
    instead = getattr(module_class, "instead_of_wrappers", "")
    if wrapper is not None and instead:
        raise RuntimeError(
            f"{wrapper} around a {module_class.__name__}: {instead}. Leave the wrapper out; accelerate.prepare(model) "
            "and Hugging Face's Trainer wrap a model where there is more than one rank (see docs/other-libraries.md)"
        )


def check_mesh(mesh: Any, name: str, spec: ShardSpec) -> None:
    """Checks the DeviceMesh of a DTensor, which `fully_shard` or `distribute_module` puts in the place of a parameter.

    Raises:
        RuntimeError: its ranks hold other shards of the parameter; the message says which mesh to pass.
    """
    if (spec.num_partitions > 1 or spec.experts) and comm.is_initialized():
        _refuse_parts(
            "A DTensor (of fully_shard, distribute_module)",
            mesh.mesh.flatten().tolist(),
            _EXPERTS.format(name) if spec.experts else f"{name} is one of {spec.num_partitions} shards",
            _EXPERTS_REPAIR
            if spec.experts
            else "Pass it a mesh of the data-parallel ranks: fully_shard(module, mesh=DeviceMesh.from_group("
            "neuronx_dist.parallel_state.get_data_parallel_group(), device_type)), or leave it out and use "
            "NeuronZero1Optimizer",
            spec.experts,
        )


def refuse_whole(
    state_dict: Mapping[str, Any],
    prefix: str,
    parameters: Mapping[str, nn.Parameter | None],
    specs: Mapping[str, ShardSpec],
) -> None:
    """Refuses tensors in a state dict that are larger than the shards of this module, whose names have a prefix there.

    Raises:
        RuntimeError: one is, as torch raises for a wrong shape.
    """
    for name, spec in specs.items():
        saved, param = state_dict.get(prefix + name), parameters.get(name)
        if param is None or not isinstance(saved, torch.Tensor) or saved.dim() != param.dim():
            continue
        if spec.is_sharded and spec.dim is not None and saved.shape[spec.dim] > param.shape[spec.dim]:
            raise RuntimeError(
                f"{prefix}{name} of the state dict has shape {[*saved.shape]}, and this rank holds a shard of shape "
                f"{[*param.shape]}: load weights of the whole model by hf.load_pretrained(model, state_dict) or "
                "model.load_state_dict(get_sharded_model_dict(model, state_dict)) of "
                "neuronx_dist.parallel_layers.checkpointing"
            )


def check_group(optimizer: str, group: Any, number: int, spec: ShardSpec) -> None:
    """Checks the process group of an optimizer that divides or averages parameters over it.

    Raises:
        RuntimeError: its ranks hold other shards of parameter `number`, or other stages of a pipeline.
    """
    what, is_part = f"parameter {number}", spec.num_partitions > 1
    if spec.experts:
        _refuse_parts(optimizer, comm.communicator(group).ranks, _EXPERTS.format(what), _EXPERTS_REPAIR, expert=True)
    elif is_part or comm.size("pp") > 1:
        part = f"one of {spec.num_partitions} shards" if is_part else f"of one of {comm.size('pp')} pipeline stages"
        _refuse_parts(optimizer, comm.communicator(group).ranks, f"{what} is {part}", _REPAIR)


def refuse_flattened(function: str, parameters: Iterable[torch.Tensor]) -> None:
    """Refuses parameters of FullyShardedDataParallel for a function that takes the norm of gradients.

    Raises:
        RuntimeError: there is one.
    """
    if any(map(is_flattened, parameters)):
        _refuse_norm(function)


def _refuse_norm(function: str, *args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        f"{function}: with FullyShardedDataParallel a rank has pieces of flat gradients, whose norm is not the "
        "model's. Use fully_shard, with which neuronx_dist.clip_grad_norm takes the norm of the whole model; at tensor "
        "parallel size 1 the method clip_grad_norm_ of FullyShardedDataParallel is right too"
    )


def note_saved(tensor: torch.Tensor, name: str) -> None:
    """Makes torch.distributed.checkpoint refuse a tensor that `state_dict` has returned: a shard of a parameter."""
    before_saving(_check_saved)
    _saved_shards[tensor] = name


def note_saved_state(optimizer: str, state: Mapping[Any, Mapping[Any, Any]]) -> None:
    """Makes torch.distributed.checkpoint refuse the tensors in an optimizer's state, by number of the parameter."""
    for number, entries in state.items():
        for entry, value in entries.items():
            if isinstance(value, torch.Tensor) and value.dim():
                note_saved(value, f"{entry} of parameter {number} in the state of {optimizer}")


def _check_saved(state_dict: Any) -> None:
    for leaf in pytree.tree_leaves(state_dict):
        if isinstance(leaf, torch.Tensor) and leaf in _saved_shards:
            raise RuntimeError(
                f"torch.distributed.checkpoint.save writes {_saved_shards[leaf]} once for all ranks, but each rank "
                "holds another shard of it: use neuronx_dist.save_checkpoint, which writes the same format, with all "
                "shards, or save a file for each rank by torch.save"
            )


def _refuse_parts(wrapper: str, group: Sequence[int], part: str, repair: str, expert: bool = False) -> None:
    """Refuses a group with ranks that do not hold this rank's part of the model."""
    copies = comm.communicator("edp" if expert else ("dp", "cp")).ranks
    if not set(group) <= set(copies):
        raise RuntimeError(
            f"{wrapper} over ranks {[*group]} takes the parameters of these ranks for copies of one model, but they "
            f"hold different parts ({part}; {comm.current().mesh}): rank {comm.current().rank} shares its part with "
            f"ranks {[*copies]}. {repair}"
        )

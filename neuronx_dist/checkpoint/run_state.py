"""A rank's part of a run in a checkpoint, by names that no layout changes.

    model.<name>                        parameters, and buffers that a state dict has, by their names in the whole model
    optimizer.state.<name>.<entry>      what the optimizer keeps of a parameter: `exp_avg`, `step`, ...
    optimizer.master.<name>             its master weights, where their dtype is not the parameter's
    optimizer.param_groups.<n>.<option> options of a group, and under `params` the names of its parameters
    optimizer.loss_scaler               the scale of an fp16 loss, if it is scaled

They are the names that torch.distributed.checkpoint gives to `{"model": model.state_dict(), "optimizer":
get_optimizer_state_dict(...)}`. A tied weight has the first of its names. A shard is described by its pieces of the
whole tensor (`pieces`), so the same keys hold the same tensors at any degree of tp, pp and dp, with and without ZeRO-1.
"""

from __future__ import annotations

import torch
from torch import nn

from .. import accelerator
from ..torch_internals.modules import non_persistent_buffers
from ..weights.partial_model import buffer_slots, install_parameter
from .dcp.catalog import Catalog
from .errors import CheckpointMismatch
from .optimizer_state import check_groups, collect_optimizer, expect_optimizer, restore_optimizer
from .parameters import Parameter, parameters_of
from .rank_tensors import ShardedTensor, State, key_of, memory_of

__all__ = ["ShardedTensor", "State", "changed_by", "check", "collect", "expect", "restore"]

_MODEL = "model"


def collect(model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> State:
    """Collects the tensors and objects of a model and its optimizer for a checkpoint, without copies or communication.

    Args:
        model: any module; of a pipeline model this stage's part.
        optimizer: `NeuronZero1Optimizer`, `MasterWeightsOptimizer` or any torch optimizer of `model`'s parameters.

    Raises:
        ValueError: an optimizer without its model, whose names the state needs; an optimizer of other parameters; a
            parameter without a value.
    """
    state = State()
    parameters = _parameters(model, optimizer)
    _add_model(state, model, parameters)
    if optimizer is not None:
        collect_optimizer(state, optimizer, parameters)
    return state


def changed_by(optimizer: torch.optim.Optimizer | None, state: State) -> set[int]:
    """Addresses of the storages that only an optimizer's step changes: its parameters and its state."""
    if optimizer is None:
        return set()
    tensors = [param for group in optimizer.param_groups for param in group["params"]]
    tensors += [sharded.tensor for key, sharded in state.tensors.items() if key.startswith("optimizer.")]
    return {
        memory_of(tensor).untyped_storage().data_ptr()
        for tensor in tensors
        if accelerator.is_copied_aside(tensor.device.type)
    }


def expect(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    catalog: Catalog,
    device: str | torch.device = "cpu",
) -> State:
    """The tensors to read from a checkpoint: the model's tensors, and new ones for the optimizer's state.

    Args:
        device: of the memory for parameters and buffers on meta, which `restore` installs.

    Raises:
        ValueError: see `collect`.
        CheckpointMismatch: a weight that is tied here has two values in the checkpoint.
    """
    state = State()
    parameters = _parameters_as_saved(model, optimizer, catalog)
    _add_model(state, model, parameters, device)
    if optimizer is not None:
        expect_optimizer(state, optimizer, parameters, catalog)
    return state


def check(state: State, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, catalog: Catalog) -> None:
    """Refuses an optimizer that cannot take the options that were read into a state of `expect`.

    Raises:
        CheckpointMismatch: the optimizer is of another class, or its parameters are divided into other groups.
    """
    if optimizer is not None:
        check_groups(state, optimizer, _parameters_as_saved(model, optimizer, catalog))


def restore(state: State, model: nn.Module | None, optimizer: torch.optim.Optimizer | None, catalog: Catalog) -> None:
    """Installs the tensors of a state of `expect` in model and optimizer; tensors that had memory were read in place.

    Raises:
        ValueError: no initialiser gives a value to a buffer on meta that the checkpoint does not have.
    """
    for parameter in _parameters_as_saved(model, optimizer, catalog).values():
        key = key_of((_MODEL, parameter.names[0]))
        if parameter.tensor.is_meta and key in catalog.tensors:
            install_parameter(parameter.tensor, state.tensors[key].tensor)
    for slot in () if model is None else buffer_slots(model):
        key = key_of((_MODEL, slot.name))
        if slot.tensor.is_meta and key in state.tensors and key in catalog.tensors:
            slot.module._buffers[slot.key] = state.tensors[key].tensor
    if optimizer is not None:
        restore_optimizer(state, optimizer, _parameters_as_saved(model, optimizer, catalog))


def _parameters(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[int, Parameter]:
    if model is None:
        if optimizer is not None:
            raise ValueError("the optimizer's state is saved by names of the model's parameters: pass the model too")
        return {}
    return parameters_of(model)


def _parameters_as_saved(
    model: nn.Module | None, optimizer: torch.optim.Optimizer | None, catalog: Catalog
) -> dict[int, Parameter]:
    parameters = _parameters(model, optimizer)
    for parameter in parameters.values():
        _name_as_saved(parameter, catalog)
    return parameters


def _add_model(
    state: State,
    model: nn.Module | None,
    parameters: dict[int, Parameter],
    device: str | torch.device | None = None,
) -> None:
    """Adds the model's tensors, and for tensors on meta new ones on `device`.

    Raises:
        ValueError: a tensor is on meta, and there is no device.
    """

    def with_memory(key: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor.detach()
        if device is None:
            raise ValueError(
                f"{key} is on the meta device: initialise the model first, by neuronx_dist.materialize(model, seed)"
            )
        return torch.empty_like(tensor.detach(), device=device, memory_format=torch.contiguous_format)

    for parameter in parameters.values():
        paths = [(_MODEL, name) for name in parameter.names]
        tensor = with_memory(key_of(paths[0]), parameter.tensor)
        state.add(ShardedTensor(paths, parameter.shape, tensor, parameter.pieces))
    for slot in () if model is None else buffer_slots(model):
        if slot.key not in non_persistent_buffers(slot.module):
            path = (_MODEL, slot.name)
            state.add(ShardedTensor.whole([path], with_memory(key_of(path), slot.tensor)))


def _name_as_saved(parameter: Parameter, catalog: Catalog) -> None:
    """Puts the checkpoint's name of a parameter first.

    Raises:
        CheckpointMismatch: the checkpoint has several of its names, with different tensors.
    """
    saved = [name for name in parameter.names if key_of((_MODEL, name)) in catalog.tensors]
    if not saved:  # the checkpoint may be of the model without adapters, and the other way round
        names = [name.replace(".base_layer.", ".") for name in parameter.names]
        saved = [name for name in names if key_of((_MODEL, name)) in catalog.tensors]
    chunks = [catalog.tensors[key_of((_MODEL, name))].chunks for name in saved]
    if any(chunk != chunks[0] for chunk in chunks):
        raise CheckpointMismatch(
            f"{' and '.join(saved)} are two tensors in the checkpoint, but one weight in this model: build the "
            "model without tied weights, like the saved one"
        )
    parameter.names = list(dict.fromkeys([*saved, *parameter.names]))

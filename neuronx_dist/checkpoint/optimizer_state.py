"""State of an optimizer by names of parameters, with ZeRO-1 or without, under the same names."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any

import torch

from ..optimizer import LossScaler, NeuronZero1Optimizer
from ..optimizer.muon import refuse_other_optimizer
from ..parallel_layers.utils import load_optimizer_state_dict
from ..spmd.local_holders import local_tensor
from ..torch_internals.tensors import pytree
from .dcp.catalog import Catalog
from .errors import CheckpointCorrupted, CheckpointMismatch
from .parameters import Parameter
from .pieces import TensorPiece, rows_of, whole_piece
from .rank_tensors import Path, ShardedTensor, State, is_laid_out, key_of

__all__ = [
    "GROUPS",
    "check_groups",
    "collect_optimizer",
    "expect_optimizer",
    "merged_groups",
    "named_groups",
    "restore_optimizer",
]

_STATE = ("optimizer", "state")
_MASTER = ("optimizer", "master")
GROUPS = ("optimizer", "param_groups")
_LOSS_SCALER = ("optimizer", "loss_scaler")

# Entries without an element for each element of the parameter, even if the parameter has one element.
_SCALARS = {"step"}

# Options that learning-rate schedulers add to those of an optimizer.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


@dataclass
class _StateSlot:
    """A parameter in the optimizer.

    Attributes:
        tensor: the tensor with the optimizer's state: the parameter, or under ZeRO-1 this rank's rows of it.
        pieces: of the whole parameter, in `tensor`.
        degree: number of ranks that the parameter's rows are divided over.
    """

    parameter: Parameter
    tensor: torch.Tensor
    pieces: list[TensorPiece]
    degree: int = 1

    @property
    def has_master(self) -> bool:
        return self.tensor.dtype != self.parameter.tensor.dtype

    @property
    def is_part(self) -> bool:
        """Returns whether other ranks hold other elements of the parameter."""
        return self.pieces != [whole_piece(self.parameter.shape)]

    @property
    def masters(self) -> list[Path]:
        """Paths of the master weights in the checkpoint."""
        return [(*_MASTER, name) for name in self.parameter.names]

    def entries(self, entry: str) -> list[Path]:
        """Paths of an entry of the state in the checkpoint."""
        return [(*_STATE, name, entry) for name in self.parameter.names]

    def sharded(self, paths: Sequence[Path], tensor: torch.Tensor) -> ShardedTensor:
        """A tensor with the layout of `self.tensor`; one that knows its layout has that."""
        if is_laid_out(self.tensor):
            return ShardedTensor.whole(paths, tensor)
        shape = self.parameter.shape  # a parameter without dims is a row under ZeRO-1
        return ShardedTensor(paths, shape, tensor if shape else tensor.view(()), self.pieces)

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """A new tensor in the layout of `self.tensor`, on the host if that is a plain tensor."""
        if is_laid_out(self.tensor):
            return torch.zeros_like(self.tensor.detach(), dtype=dtype)
        return torch.zeros(self.tensor.shape, dtype=dtype)

    def is_sharded(self, entry: str, shape: Sequence[int], like: Sequence[int]) -> bool:
        """Returns whether an entry has one element for each element of the parameter."""
        return entry not in _SCALARS and tuple(shape) == tuple(like)


def collect_optimizer(state: State, optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter]) -> None:
    """Adds the state of an optimizer.

    Raises:
        ValueError: the optimizer is of other parameters, or its state has a tensor whose part of the whole is unknown.
    """
    slots, base = _slots(optimizer, parameters)
    for slot in slots:
        if slot.has_master:
            state.add(slot.sharded(slot.masters, slot.tensor.detach()))
        for entry, value in base.state.get(slot.tensor, {}).items():
            paths = slot.entries(entry)
            if not isinstance(value, torch.Tensor):
                if slot.is_part and any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
                    raise ValueError(
                        f"{type(base).__name__} has tensors in a {type(value).__name__}, {entry!r}, for "
                        f"{slot.parameter.names[0]}, of which this rank has a part: the checkpoint cannot tell "
                        "which part they belong to"
                    )
                state.objects[paths[0]] = value
            elif slot.is_sharded(entry, value.shape, slot.tensor.shape):
                state.add(slot.sharded(paths, value))
            elif not value.dim() or (slot.degree == 1 and slot.parameter.shape == tuple(slot.tensor.shape)):
                state.add(ShardedTensor.whole(paths, value))
            else:
                raise ValueError(
                    f"{type(base).__name__} has {entry!r} of shape {tuple(value.shape)} for "
                    f"{slot.parameter.names[0]}, of which this rank has a shard of shape "
                    f"{tuple(slot.tensor.shape)}: the checkpoint cannot tell which part of the parameter the state "
                    "belongs to"
                )
    state.groups = named_groups(optimizer, parameters)
    scaler = _loss_scaler(optimizer)
    if scaler is not None:
        state.objects[_LOSS_SCALER] = scaler.state_dict()


def expect_optimizer(
    state: State, optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter], catalog: Catalog
) -> None:
    """Adds new tensors for the checkpoint's state of this rank's parameters, to be read and then restored."""
    saved: dict[str, set[str]] = {}
    prefix = key_of((*_STATE, ""))
    for key in (*catalog.tensors, *catalog.objects):
        if key.startswith(prefix):
            name, _, entry = key[len(prefix) :].rpartition(".")
            saved.setdefault(name, set()).add(entry)
    slots = _slots(optimizer, parameters)[0]
    trained = {slot.parameter.names[0] for slot in slots}
    for parameter in parameters.values():
        if parameter.names[0] not in trained and not parameter.tensor.requires_grad:
            # Adagrad has state of frozen parameters too, ZeRO-1 does not.
            state.unneeded |= {key_of((*_STATE, parameter.names[0], e)) for e in saved.get(parameter.names[0], ())}
    for slot in slots:
        if slot.has_master and key_of(slot.masters[0]) in catalog.tensors:
            state.add(slot.sharded(slot.masters, slot.zeros(slot.tensor.dtype)))
        for entry in sorted(saved.get(slot.parameter.names[0], ())):
            paths = slot.entries(entry)
            tensor = catalog.tensors.get(key_of(paths[0]))
            if tensor is None:
                state.objects[paths[0]] = None
            elif slot.is_sharded(entry, tensor.shape, slot.parameter.shape):
                state.add(slot.sharded(paths, slot.zeros(tensor.dtype)))
            else:
                state.add(ShardedTensor.whole(paths, torch.zeros(tensor.shape, dtype=tensor.dtype)))
    state.objects[GROUPS] = None
    if catalog.has(key_of(_LOSS_SCALER)):
        state.objects[_LOSS_SCALER] = None


def check_groups(state: State, optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter]) -> None:
    """Refuses parameter groups that cannot be restored, before anything is changed.

    Raises:
        CheckpointMismatch: the groups are of another class of optimizers, or divided in another way.
        CheckpointCorrupted: the number of steps is missing, or no number.
    """
    paths = [
        path for path in (*state.objects, *(tensor.paths[0] for tensor in state.tensors.values())) if path[:2] == _STATE
    ]
    entries: dict[Any, set[Any]] = {}
    for path in paths:
        entries.setdefault(path[2], set()).add(path[-1])
    for scalar in _SCALARS:
        # Groups of different optimizers have different entries: Muon counts no steps.
        complete = [names for names in entries.values() if scalar in names]
        lacking = [name for name, names in entries.items() if scalar not in names and names | {scalar} in complete]
        if lacking:
            raise CheckpointCorrupted(f"the state of {min(map(str, lacking))} has no {scalar}, which others have")
    for path, value in state.objects.items():
        if path[:2] == _STATE and path[-1] in _SCALARS and not isinstance(value, (int, float)):
            raise CheckpointCorrupted(f"{key_of(path)} is {short(value)}, and no number")
    for key, sharded in state.tensors.items():
        if sharded.paths[0][:2] == _STATE and sharded.paths[0][-1] in _SCALARS and math.prod(sharded.shape) != 1:
            raise CheckpointCorrupted(f"{key} has shape {sharded.shape}, and is one number")
    if state.objects[GROUPS] is not None:
        _restored_groups(optimizer, parameters, state.objects[GROUPS])


def restore_optimizer(state: State, optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter]) -> None:
    """Loads the state that was read into an optimizer; to be called after the model's parameters are read."""
    if state.objects[GROUPS] is None:
        return
    slots = _slots(optimizer, parameters)[0]
    read: dict[Path, Any] = {tensor.paths[0]: tensor.tensor for tensor in state.tensors.values()}
    read.update(state.objects)
    values: dict[str, dict[str, Any]] = {}
    for path, value in read.items():
        if path[:2] == _STATE:
            values.setdefault(str(path[2]), {})[str(path[3])] = value
    entries = {
        index: {entry: _as_kept(slot, entry, value) for entry, value in values[slot.parameter.names[0]].items()}
        for index, slot in enumerate(slots)
        if slot.parameter.names[0] in values
    }
    groups = _restored_groups(optimizer, parameters, state.objects[GROUPS])
    scaler = _loss_scaler(optimizer)
    if scaler is not None and state.objects.get(_LOSS_SCALER) is not None:
        scaler.load_state_dict(state.objects[_LOSS_SCALER])
    if not isinstance(optimizer, NeuronZero1Optimizer):
        load_optimizer_state_dict(optimizer, {"state": entries, "param_groups": groups})
        return
    if any(slot.tensor.is_meta for slot in slots):
        optimizer.init_zero()  # the shards were made before the parameters had memory
    shapes = {index: tuple(local_tensor(slot.parameter.tensor).shape) for index, slot in enumerate(slots)}
    optimizer.load_state_dict({"state": {}, "param_groups": groups, "base_state": entries, "shape_info": shapes})
    for slot in slots:  # masters that were not saved have been made from the parameters
        if slot.masters[0] in read:
            with torch.no_grad():
                slot.tensor.copy_(read[slot.masters[0]].view(slot.tensor.shape))


def named_groups(optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter]) -> list[dict[str, Any]]:
    """Options of this rank's parameter groups, with names of parameters under `params`."""
    return [_saved_group(group, parameters) for group in optimizer.param_groups]


def merged_groups(groups_of_ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The parameter groups of the whole model, from those of each rank.

    Raises:
        ValueError: a parameter is in different groups on different ranks.
    """
    merged: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    for rank, groups in enumerate(groups_of_ranks):
        for index, group in enumerate(groups):
            if index == len(merged):
                merged.append({**group, "params": []})
            for name in group["params"]:
                if group_of.setdefault(name, index) != index:
                    raise ValueError(
                        f"{name} is in parameter group {index} of rank {rank}'s optimizer, but in group "
                        f"{group_of[name]} on another rank: pass all ranks the same groups, empty where a stage has "
                        "no parameters"
                    )
    for name, index in group_of.items():
        merged[index]["params"].append(name)
    return merged


def _saved_group(group: Mapping[str, Any], parameters: Mapping[int, Parameter]) -> dict[str, Any]:
    """A group's options, and its parameters by name."""
    options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
    return {**options, "params": [_parameter(tensor, parameters).names[0] for tensor in group["params"]]}


def _restored_groups(
    optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The groups of a state dict, with the options of the saved groups that contain their parameters.

    Options that the checkpoint lacks stay: a later version of the optimizer may have more options.

    Raises:
        CheckpointMismatch: a group has parameters of several saved groups, or options of another class of optimizers.
    """
    if not isinstance(saved, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in saved
    ):
        raise CheckpointCorrupted("the parameter groups of the checkpoint are no list of dicts with params")
    base = _slots(optimizer, parameters)[1]
    group_of = {name: index for index, group in enumerate(saved) for name in group["params"]}
    groups, count = [], 0
    for index, group in enumerate(optimizer.param_groups):
        names = [_parameter(tensor, parameters).names for tensor in group["params"]]
        sources = sorted({group_of[name] for aliases in names for name in aliases[:1] if name in group_of})
        if len(sources) > 1:
            raise CheckpointMismatch(
                f"parameter group {index} of the optimizer has parameters of several groups of the checkpoint, "
                f"{', '.join(map(str, sources))}, whose options may differ: create the optimizer with the same "
                "groups"
            )
        source = sources[0] if sources else index
        if sources:
            try:
                refuse_other_optimizer([saved[source]], [group])
            except ValueError as error:
                raise CheckpointMismatch(f"the checkpoint is of another optimizer class: {error}") from None
        options = {**group, **(saved[source] if source < len(saved) else {})}
        lacking = sorted(base.defaults.keys() - (saved[source] if source < len(saved) else group).keys())
        unknown = sorted(options.keys() - group.keys() - _OF_SCHEDULERS)
        if lacking and unknown:
            raise CheckpointMismatch(
                f"the checkpoint is of another optimizer class: it has the options {', '.join(unknown)} where "
                f"{type(base).__name__} has {', '.join(lacking)}. Load it into an optimizer of the saved class, or "
                "leave the optimizer out, to continue with the weights alone"
            )
        for name in base.defaults.keys() & options.keys():
            if not _is_alike(options[name], group.get(name)):
                raise CheckpointMismatch(
                    f"the option {name} of parameter group {source} is {short(options[name])} in the checkpoint, and "
                    f"{short(group.get(name))} in this optimizer: the checkpoint is damaged, or of another class"
                )
        numbers = list(range(count, count + len(names)))
        count += len(names)
        groups.append({**{name: value for name, value in options.items() if name != "param_names"}, "params": numbers})
    return groups


def _is_alike(saved: Any, current: Any) -> bool:
    """Returns whether two values of an option are of one sort: numbers, sequences of as many, texts; None fits all."""
    number = (int, float, torch.Tensor)
    if saved is None or current is None:
        return True
    if isinstance(current, number):
        return isinstance(saved, number)
    if isinstance(current, (list, tuple)):
        return isinstance(saved, (list, tuple)) and len(saved) == len(current) and all(map(_is_alike, saved, current))
    return isinstance(saved, type(current))


def _loss_scaler(optimizer: torch.optim.Optimizer) -> LossScaler | None:
    return optimizer.loss_scaler if isinstance(optimizer, NeuronZero1Optimizer) else None


def _as_kept(slot: _StateSlot, entry: str, value: Any) -> Any:
    """An entry in the optimizer's shape: a parameter without dims is a row under ZeRO-1."""
    is_row = isinstance(value, torch.Tensor) and slot.is_sharded(entry, value.shape, slot.parameter.shape)
    return value.view(slot.tensor.shape) if is_row and not slot.parameter.shape else value


def _slots(
    optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter]
) -> tuple[list[_StateSlot], torch.optim.Optimizer]:
    """Slots of the optimizer's parameters, in order, and the optimizer that holds the state.

    Raises:
        ValueError: a parameter is not one of the model.
    """
    if not isinstance(optimizer, NeuronZero1Optimizer):
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        members = [_parameter(tensor, parameters) for tensor in tensors]
        return [_StateSlot(member, member.tensor, member.pieces) for member in members], optimizer
    if optimizer.base_optimizer is None:
        optimizer.init_zero()
    assert optimizer.base_optimizer is not None
    slots = []
    of_local = {id(local_tensor(parameter.tensor)): parameter for parameter in parameters.values()}
    for shard in optimizer.shards:
        parameter = _parameter(shard.param, of_local)
        first = shard.group.rank * shard.shape[0]
        if parameter.shape:
            pieces = rows_of(parameter.pieces, first, first + shard.shape[0])
        else:
            pieces = [whole_piece(())] if first == 0 else []
        slots.append(_StateSlot(parameter, shard.master, pieces, shard.degree))
    return slots, optimizer.base_optimizer


def _parameter(tensor: torch.Tensor, parameters: Mapping[int, Parameter]) -> Parameter:
    if id(tensor) not in parameters:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(tensor.shape)} that is not one of this rank's "
            "parameters of the model, whose names its state needs: pass the model that the optimizer was created for"
        )
    return parameters[id(tensor)]

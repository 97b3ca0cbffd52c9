"""What an optimizer keeps of parameters, with ZeRO-1 or without, under the same names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .. import comm
from ..optimizer import NeuronZero1Optimizer
from ..parallel_layers.utils import load_optimizer_state_dict
from .catalog import Catalog, SavedTensor
from .errors import CheckpointMismatch
from .parameters import Parameter
from .pieces import Piece, rows_of, whole_piece
from .tensors import ShardedTensor, State

__all__ = ["collect_optimizer", "expect_optimizer", "restore_optimizer"]

_STATE = ("optimizer", "state")
_MASTER = ("optimizer", "master")
_GROUPS = ("optimizer", "param_groups")


@dataclass
class _Slot:
    """A parameter as the optimizer has it.

    Attributes:
        tensor: what the optimizer's state is of: the parameter, or its rows that this rank has under ZeRO-1.
        pieces: what `tensor` holds of the whole parameter.
    """

    parameter: Parameter
    tensor: torch.Tensor
    pieces: list[Piece]

    def path(self, *entry: str) -> tuple[str, ...]:
        return (*(_STATE if entry else _MASTER), self.parameter.name, *entry)

    def sharded(self, path: tuple[str, ...], tensor: torch.Tensor) -> ShardedTensor:
        """A tensor that is laid out as `self.tensor` is."""
        shape = self.parameter.shape
        return ShardedTensor(path, shape, tensor if shape else tensor.view(()), self.pieces)

    @property
    def has_master(self) -> bool:
        return self.tensor.dtype != self.parameter.tensor.dtype


def collect_optimizer(state: State, optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter]) -> None:
    """Adds what an optimizer keeps. All ranks of a pipeline call it together."""
    base = _base(optimizer)
    for slot in _slots(optimizer, parameters):
        if slot.has_master:
            state.add(slot.sharded(slot.path(), slot.tensor.detach()))
        for entry, value in base.state.get(slot.tensor, {}).items():
            if not isinstance(value, torch.Tensor):
                state.objects[slot.path(entry)] = value
            elif value.shape == slot.tensor.shape and not _is_scalar(slot, entry):
                state.add(slot.sharded(slot.path(entry), value))
            elif not value.dim() or slot.parameter.shape == tuple(slot.tensor.shape):
                state.add(ShardedTensor.whole(slot.path(entry), value))
            else:
                raise ValueError(
                    f"{type(base).__name__} keeps {entry!r} of shape {tuple(value.shape)} for {slot.parameter.name}, of "
                    f"which this rank has a shard {tuple(slot.tensor.shape)}: what part it is of the whole is not known"
                )
    state.objects[_GROUPS] = _groups(optimizer, parameters)


def expect_optimizer(
    state: State, optimizer: torch.optim.Optimizer, parameters: Mapping[int, Parameter], catalog: Catalog
) -> None:
    """Adds new tensors for what a checkpoint has of an optimizer's parameters."""
    saved: dict[str, dict[str, SavedTensor]] = {}
    prefix = ".".join((*_STATE, ""))
    for key, tensor in catalog.tensors.items():
        if key.startswith(prefix):
            name, _, entry = key[len(prefix) :].rpartition(".")
            saved.setdefault(name, {})[entry] = tensor
    for slot in _slots(optimizer, parameters):
        master = slot.path()
        if slot.has_master and ".".join(master) in catalog.tensors:
            state.add(slot.sharded(master, torch.zeros(slot.tensor.shape, dtype=slot.tensor.dtype)))
        entries = next((saved[name] for name in slot.parameter.names if name in saved), {})
        for entry, tensor in entries.items():
            if tensor.shape == slot.parameter.shape and not _is_scalar(slot, entry):
                state.add(slot.sharded(slot.path(entry), torch.zeros(slot.tensor.shape, dtype=tensor.dtype)))
            else:
                state.add(ShardedTensor.whole(slot.path(entry), torch.zeros(tensor.shape, dtype=tensor.dtype)))

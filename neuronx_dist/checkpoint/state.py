"""What a checkpoint holds of a run, as one rank has it, by names that no layout changes.

    model.<name>                        parameters, and buffers that a state dict has, by their names in the whole model
    optimizer.state.<name>.<entry>      what the optimizer keeps of a parameter: `exp_avg`, `step`, ...
    optimizer.master.<name>             its master weights, where they are wider than the parameter
    optimizer.param_groups              options and names of parameters, by group

A tied weight has the first of its names. A shard is described by its pieces of the whole tensor (`pieces`), so the
same keys hold the same tensors at any degree of tp, pp and dp, with and without ZeRO-1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .pieces import Piece

__all__ = ["ShardedTensor", "State", "collect", "restore"]


@dataclass
class ShardedTensor:
    """What this rank holds of a tensor.

    Attributes:
        key: its name in the checkpoint.
        shape: of the whole tensor, without padding.
        tensor: this rank's part, `[local shape]`, padding included. What is read is written into it.
        pieces: where its elements lie in the whole.
    """

    key: str
    shape: tuple[int, ...]
    tensor: torch.Tensor
    pieces: list[Piece]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


@dataclass
class State:
    """What this rank saves or loads.

    Attributes:
        tensors: by key. Several ranks may hold the same pieces: one of them writes.
        objects: plain data (what `torch.load(weights_only=True)` takes), by key; equal on all ranks that have the key.
        aliases: other keys of a tensor, to its key: the names of a tied weight.
    """

    tensors: dict[str, ShardedTensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)


def collect(model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> State:
    """What a checkpoint is to hold of a model and its optimizer; nothing is copied. All ranks call it.

    Args:
        model: any module; of a pipeline model this stage's part.
        optimizer: `NeuronZero1Optimizer`, `MasterWeightsOptimizer` or any torch optimizer of `model`'s parameters. Its
            keys are names of the model, so an optimizer without its model is refused.
    """
    raise NotImplementedError


def restore(state: State, model: nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Puts what was read into a state (`files.read`) back into the optimizer. The model's tensors are its own."""
    raise NotImplementedError

"""This rank's parameters: their names in the whole model, and the pieces of them that it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .. import comm
from ..gradients.gradient import ParameterGradient
from ..weights.partial_model import PartialModel, parameter_names, parameter_slots
from ..weights.shard_spec import spec_of
from .pieces import Piece, pieces_of

__all__ = ["Parameter", "parameters_of"]


@dataclass
class Parameter:
    """A parameter of this rank.

    Attributes:
        names: all that it has in the whole model; the first is that of the checkpoint.
        tensor: this rank's shard.
        shape: of the whole parameter, without padding.
        pieces: what the shard holds of it.
    """

    names: list[str]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    pieces: list[Piece]


def parameters_of(model: nn.Module | PartialModel) -> dict[int, Parameter]:
    """The parameters of this rank, by `id`.

    Raises:
        ValueError: a parameter of experts, which are different ones on the ranks of ep, under one name.
    """
    names = parameter_names(model)
    parameters: dict[int, Parameter] = {}
    for slot in parameter_slots(model):
        tensor = slot.tensor
        if id(tensor) in parameters:
            continue
        if comm.size("ep") > 1 and ParameterGradient(tensor).is_expert:
            raise ValueError(
                f"{slot.name} is of experts, which differ over the {comm.size('ep')} ranks of ep: checkpoints of "
                f"experts are not supported at expert_model_parallel_size > 1"
            )
        spec = spec_of(tensor)
        index = 0 if spec.axis is None else comm.rank(spec.axis)
        parameters[id(tensor)] = Parameter(names[id(tensor)], tensor, spec.unpadded_shape, pieces_of(spec, index))
    return parameters

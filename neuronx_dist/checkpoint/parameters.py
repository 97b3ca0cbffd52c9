"""This rank's parameters: their names in the whole model, and the pieces of them that it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .. import comm
from ..gradients.gradient import ParameterGradient
from ..weights.partial_model import PartialModel, parameter_names, parameter_slots
from ..weights.shard_spec import spec_of
from .pieces import TensorPiece, pieces_of, shifted
from .rank_tensors import held_pieces, is_laid_out

__all__ = ["Parameter", "parameters_of"]


@dataclass
class Parameter:
    """A parameter of this rank.

    Attributes:
        names: all names in the whole model; the first is the name in the checkpoint.
        tensor: this rank's shard, or a ShardTensor or DTensor, which holds it.
        shape: of the whole parameter, without padding.
        pieces: of the whole parameter, in the shard.
    """

    names: list[str]
    tensor: torch.Tensor
    shape: tuple[int, ...]
    pieces: list[TensorPiece]


def parameters_of(model: nn.Module | PartialModel) -> dict[int, Parameter]:
    """The parameters of this rank, by `id`.

    A parameter marked with `expert_model_parallel` has the experts of this ep rank in dim 0, in NxD's layout,
    `[experts/ep, ...]`: the whole parameter has the experts of all ep ranks, in the order of ranks.

    Raises:
        ValueError: a parameter of experts has no dims; a parameter is a summand (`held_pieces`).
    """
    names = parameter_names(model)
    parameters: dict[int, Parameter] = {}
    for slot in parameter_slots(model):
        tensor = slot.tensor
        if id(tensor) in parameters:
            continue
        spec = spec_of(tensor)
        index = 0 if spec.axis is None else comm.rank(spec.axis)
        shape = spec.unpadded_shape
        pieces = held_pieces(slot.name, tensor) if is_laid_out(tensor) else pieces_of(spec, index)
        if comm.size("ep") > 1 and ParameterGradient(tensor).is_expert and spec.axis != "ep":
            if not shape:
                raise ValueError(
                    f"{slot.name} is marked as a parameter of experts, but is a scalar: it needs dim 0, over "
                    f"experts, which is sharded over the {comm.size('ep')} ranks of ep"
                )
            pieces = shifted(pieces, comm.rank("ep") * shape[0])
            shape = (comm.size("ep") * shape[0], *shape[1:])
        parameters[id(tensor)] = Parameter(names[id(tensor)], tensor, shape, pieces)
    return parameters

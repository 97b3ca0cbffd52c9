"""What a recording became on this rank, for inputs of one shape."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.utils._pytree as pytree

from ..cut.stage import Stage
from ..record.recording import TensorSpec
from .lockstep import Transfers

__all__ = ["StageProgram"]


class StageProgram(NamedTuple):
    """What a stage runs for each microbatch.

    Attributes:
        chunks: the stage's pieces of the model, as functions.
        structure: how output leaves make up the forward's result.
        loss: the loss, if it is known which output that is.
        constants: inputs that are no tensors; compared by identity where they do not hash, so they must stay alive.
        transfers: between stages, where ranks have no messages.
    """

    chunks: tuple[Stage, ...]
    structure: pytree.TreeSpec
    loss: TensorSpec | None
    constants: list[Any]
    transfers: Transfers | None

    @property
    def input_leaves(self) -> list[int]:
        """Numbers of the input leaves (of `tree_flatten(inputs)`) that this stage reads."""
        return list(dict.fromkeys(leaf for chunk in self.chunks for leaf in chunk.input_leaves))

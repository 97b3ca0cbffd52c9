"""The tensors and objects of a checkpoint as one rank has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .pieces import Piece, whole_piece

__all__ = ["ShardedTensor", "State", "key_of"]


def key_of(path: Sequence[str]) -> str:
    """The key of what stands at `path` in nested dicts."""
    return ".".join(path)


@dataclass
class ShardedTensor:
    """What this rank holds of a tensor.

    Attributes:
        path: where it stands in nested dicts: `("optimizer", "state", name, "exp_avg")`; its key is `key_of(path)`.
        shape: of the whole tensor, without padding.
        tensor: this rank's part, `[local shape]`, padding included. What is read is written into it.
        pieces: where its elements lie in the whole.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    tensor: torch.Tensor
    pieces: list[Piece]

    @classmethod
    def whole(cls, path: tuple[str, ...], tensor: torch.Tensor) -> ShardedTensor:
        """A tensor that this rank holds all of."""
        shape = tuple(tensor.shape)
        return cls(path, shape, tensor, [whole_piece(shape)])


@dataclass
class State:
    """What this rank saves or loads.

    Attributes:
        tensors: by key. Several ranks may hold the same pieces: one of them writes.
        objects: plain data (what `torch.load(weights_only=True)` takes), by path; equal on all ranks that have it.
        aliases: other keys of tensors, and their keys: the names of a tied weight.
    """

    tensors: dict[str, ShardedTensor] = field(default_factory=dict)
    objects: dict[tuple[str, ...], Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, tensor: ShardedTensor) -> None:
        self.tensors[key_of(tensor.path)] = tensor

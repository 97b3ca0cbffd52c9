"""One rank's tensors and objects of a checkpoint, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .pieces import TensorPiece, whole_piece

__all__ = ["Path", "ShardedTensor", "State", "key_of"]

Path = tuple[str | int, ...]


def key_of(path: Sequence[str | int]) -> str:
    """The key of the item at `path` in nested dicts and lists."""
    return ".".join(map(str, path))


@dataclass
class ShardedTensor:
    """This rank's part of a tensor.

    Attributes:
        paths: paths in nested dicts, such as `("optimizer", "state", name, "exp_avg")`; a tied weight has several. The
            first one determines the key.
        shape: of the whole tensor, without padding.
        tensor: this rank's part, `[local shape]`, padding included. Reading writes into it.
        pieces: places of its elements in the whole tensor.
    """

    paths: Sequence[Path]
    shape: tuple[int, ...]
    tensor: torch.Tensor
    pieces: list[TensorPiece]

    @classmethod
    def whole(cls, paths: Sequence[Path], tensor: torch.Tensor) -> ShardedTensor:
        """A tensor that this rank holds whole."""
        shape = tuple(tensor.shape)
        return cls(paths, shape, tensor, [whole_piece(shape)])

    @property
    def keys(self) -> list[str]:
        return [key_of(path) for path in self.paths]


@dataclass
class State:
    """Tensors and objects that this rank saves or loads.

    Attributes:
        tensors: by their first key. If several ranks hold equal pieces, one of them writes.
        objects: plain data (that `torch.load(weights_only=True)` accepts), by path; equal on all ranks that have it.
        groups: options of the optimizer's parameter groups, with names of this rank's parameters under `params`.
        unneeded: keys that a checkpoint may have and that are not loaded.
    """

    tensors: dict[str, ShardedTensor] = field(default_factory=dict)
    objects: dict[Path, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    unneeded: set[str] = field(default_factory=set)

    def add(self, tensor: ShardedTensor) -> None:
        self.tensors[tensor.keys[0]] = tensor

"""The tensors and objects of a checkpoint as one rank has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .pieces import Piece, whole_piece

__all__ = ["Path", "ShardedTensor", "State", "key_of"]

Path = tuple[str | int, ...]


def key_of(path: Sequence[str | int]) -> str:
    """The key of what stands at `path` in nested dicts and lists."""
    return ".".join(map(str, path))


@dataclass
class ShardedTensor:
    """What this rank holds of a tensor.

    Attributes:
        paths: where it stands in nested dicts, such as `("optimizer", "state", name, "exp_avg")`; a tied weight has
            several. The first gives its key.
        shape: of the whole tensor, without padding.
        tensor: this rank's part, `[local shape]`, padding included. What is read is written into it.
        pieces: where its elements lie in the whole.
    """

    paths: Sequence[Path]
    shape: tuple[int, ...]
    tensor: torch.Tensor
    pieces: list[Piece]

    @classmethod
    def whole(cls, paths: Sequence[Path], tensor: torch.Tensor) -> ShardedTensor:
        """A tensor that this rank holds all of."""
        shape = tuple(tensor.shape)
        return cls(paths, shape, tensor, [whole_piece(shape)])

    @property
    def keys(self) -> list[str]:
        return [key_of(path) for path in self.paths]


@dataclass
class State:
    """What this rank saves or loads.

    Attributes:
        tensors: by their first key. Several ranks may hold the same pieces: one of them writes.
        objects: plain data (what `torch.load(weights_only=True)` takes), by path; equal on all ranks that have it.
        groups: the options of the optimizer's parameter groups, and under `params` names of this rank's parameters.
        unneeded: keys that a checkpoint may have and that are not loaded.
    """

    tensors: dict[str, ShardedTensor] = field(default_factory=dict)
    objects: dict[Path, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    unneeded: set[str] = field(default_factory=set)

    def add(self, tensor: ShardedTensor) -> None:
        self.tensors[tensor.keys[0]] = tensor

"""One rank's tensors and objects of a checkpoint, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from .pieces import TensorPiece, whole_piece

__all__ = ["Path", "ShardedTensor", "State", "held_pieces", "is_laid_out", "key_of", "memory_of"]

Path = tuple[str | int, ...]


def key_of(path: Sequence[str | int]) -> str:
    """The key of the item at `path` in nested dicts and lists."""
    return ".".join(map(str, path))


def is_laid_out(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor has the whole's shape and a part's memory, as a ShardTensor: it has DCP's protocol."""
    return hasattr(tensor, "__create_chunk_list__")


def held_pieces(key: str, tensor: torch.Tensor) -> list[TensorPiece]:
    """The pieces of the whole tensor that this rank holds of a tensor which is laid out (`is_laid_out`).

    Raises:
        ValueError: the tensor is a summand of the whole.
    """
    try:
        chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{key} cannot be a part of a checkpoint: {error}") from error
    return [
        TensorPiece(tuple(slice(0, size) for size in chunk.sizes), tuple(chunk.offsets), tuple(chunk.sizes))
        for chunk in chunks
        if chunk.sizes.numel()
    ]


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, a plain tensor in the same memory; a plain tensor unchanged."""
    if not is_laid_out(tensor):
        return tensor
    part: torch.Tensor = tensor.__get_tensor_shard__(MetadataIndex(""))  # type: ignore[attr-defined]
    return part.detach()


@dataclass
class ShardedTensor:
    """This rank's part of a tensor.

    Attributes:
        paths: paths in nested dicts, such as `("optimizer", "state", name, "exp_avg")`; a tied weight has several. The
            first one determines the key.
        shape: of the whole tensor, without padding.
        tensor: this rank's part, `[local shape]`, padding included; or a ShardTensor or DTensor, which holds it.
        pieces: places of its elements in the whole tensor.
    """

    paths: Sequence[Path]
    shape: tuple[int, ...]
    tensor: torch.Tensor
    pieces: list[TensorPiece]

    @classmethod
    def whole(cls, paths: Sequence[Path], tensor: torch.Tensor) -> ShardedTensor:
        """A tensor that this rank holds whole, or that knows its layout."""
        shape = tuple(tensor.shape)
        pieces = held_pieces(key_of(paths[0]), tensor) if is_laid_out(tensor) else [whole_piece(shape)]
        return cls(paths, shape, tensor, pieces)

    @property
    def memory(self) -> torch.Tensor:
        """This rank's part, `[local shape]`, as a plain tensor. Reading writes into it."""
        return memory_of(self.tensor)

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

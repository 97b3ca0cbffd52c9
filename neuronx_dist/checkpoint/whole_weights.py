"""The weights of a checkpoint as whole tensors by name, one slice in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .pieces import Piece, whole_piece
from .reading import fill
from .source import Source
from .tensors import ShardedTensor

__all__ = ["SavedWeights"]

_PREFIX = "model."


class SavedWeights:
    """The weights in what `save_checkpoint` or NeuronX Distributed wrote: a `WeightSource` of `neuronx_dist.hf`.

    A tied weight has the first of its names.
    """

    def __init__(self, source: Source, description: str) -> None:
        self.description = description
        self._source = source
        tensors = source.catalog.tensors
        firsts: dict[object, str] = {}
        for key in tensors:
            if key.startswith(_PREFIX):
                firsts.setdefault(tuple(tensors[key].chunks) or key, key)
        self._keys = {key[len(_PREFIX) :]: key for key in firsts.values()}

    def names(self) -> Iterable[str]:
        return self._keys.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.catalog.tensors[self._keys[name]].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._source.catalog.tensors[self._keys[name]].dtype

    def read(self, name: str, dim: int | None = None, start: int = 0, stop: int = 0) -> torch.Tensor:
        shape = self.shape(name)
        piece = whole_piece(shape)
        if dim is not None:
            own = (*shape[:dim], stop - start, *shape[dim + 1 :])
            piece = Piece(whole_piece(own).local, tuple(start * (at == dim) for at in range(len(shape))), own)
        saved = self._source.catalog.tensors[self._keys[name]]
        target = torch.empty(piece.shape, dtype=saved.dtype)
        fill(ShardedTensor([], shape, target, [piece]), saved, self._source)
        return target

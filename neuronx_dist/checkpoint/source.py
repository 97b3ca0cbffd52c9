"""What a checkpoint is read from, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .catalog import Catalog, Chunk, Extent
from .sharing import Ranges

__all__ = ["Read", "Rectangle", "Source"]


class Rectangle(Protocol):
    """A part of a whole tensor, as it is stored."""

    def copy(self, slices: Sequence[slice], target: torch.Tensor) -> None:
        """Writes these slices of it into `target`."""


class Read(NamedTuple):
    """What is read of a saved rectangle of a tensor."""

    chunk: Chunk
    dtype: torch.dtype
    slices: tuple[slice, ...]


class Source(Protocol):
    """A checkpoint, of which nothing is read before it is asked for."""

    @property
    def catalog(self) -> Catalog: ...

    def needs(self, objects: Iterable[Extent], reads: Iterable[Read]) -> dict[str, Ranges]:
        """The bytes of its files that these take, if it has checksums."""

    def share(self, needs: Sequence[Mapping[str, Ranges]], objects: Iterable[Extent]) -> None:
        """Divides the work of verifying files among the ranks.

        Args:
            needs: of each rank.
            objects: that this rank reads.
        """

    def object(self, extent: Extent) -> Any: ...

    def open(self, chunk: Chunk, dtype: torch.dtype) -> Rectangle: ...

    def finish(self) -> None:
        """Is called when all is read, and raises CheckpointCorrupted if files are damaged that were not read."""

"""Interface of a checkpoint that is read, whichever library wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from .catalog import Catalog, Extent, StoredChunk
from .checksums import Ranges

__all__ = ["RectangleRead", "StoredRectangle", "CheckpointSource"]


class StoredRectangle(Protocol):
    """A stored rectangle of a whole tensor."""

    def copy(self, slices: Sequence[slice], target: torch.Tensor) -> None:
        """Writes slices of the rectangle into `target`."""


class RectangleRead(NamedTuple):
    """Slices to read of a saved rectangle of a tensor."""

    chunk: StoredChunk
    dtype: torch.dtype
    slices: tuple[slice, ...]


class CheckpointSource(Protocol):
    """A checkpoint; nothing is read before it is requested."""

    @property
    def catalog(self) -> Catalog: ...

    def needs(self, objects: Iterable[Extent], reads: Iterable[RectangleRead]) -> dict[str, Ranges]:
        """Bytes of the files that these objects and reads need, by file; empty for files without checksums."""

    def share(self, needs: Sequence[Mapping[str, Ranges]], objects: Iterable[Extent]) -> None:
        """Divides the work of verifying files among the ranks.

        Args:
            needs: of each rank.
            objects: that this rank reads.
        """

    def object(self, extent: Extent) -> Any: ...

    def open(self, chunk: StoredChunk, dtype: torch.dtype) -> StoredRectangle: ...

    def finish(self) -> None:
        """Verifies files that were not read, after all reads; raises CheckpointCorrupted if one is damaged."""

"""What a checkpoint is read from, whoever wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from .catalog import Catalog, Chunk, Extent

__all__ = ["Rectangle", "Source"]


class Rectangle(Protocol):
    """A part of a whole tensor, as it is stored."""

    def copy(self, slices: Sequence[slice], target: torch.Tensor) -> None:
        """Writes these slices of it into `target`."""


class Source(Protocol):
    """A checkpoint, of which nothing is read before it is asked for."""

    @property
    def catalog(self) -> Catalog: ...

    def object(self, extent: Extent) -> Any: ...

    def open(self, chunk: Chunk, dtype: torch.dtype) -> Rectangle: ...

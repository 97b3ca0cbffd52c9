"""Bytes of tensors, and tensors of bytes, without copies and without numpy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

__all__ = ["as_bytes", "as_tensor"]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which lives as long as the view does."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    array = (ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def as_tensor(data: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over writable bytes; a copy of bytes that cannot be written."""
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    if data.readonly:  # torch warns of it
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=dtype).view(tuple(shape))

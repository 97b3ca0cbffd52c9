"""NxD's `cumsum`, which is a product of matrices on Neuron."""

from __future__ import annotations

import torch

__all__ = ["cumsum"]


def cumsum(tensor: torch.Tensor, dim: int = 0, tril_size: int = 2048) -> torch.Tensor:
    """Returns the cumulative sum along a dim, summed in float64, in the tensor's dtype; `tril_size` has no effect."""
    return torch.cumsum(tensor, dim, dtype=torch.float64).to(tensor.dtype)

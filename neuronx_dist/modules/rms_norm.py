"""NxD's import path of the norm, and its function."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ..parallel_layers.layer_norm import RMSNorm

__all__ = ["RMSNorm", "manual_rms_norm"]


def manual_rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Root-mean-square norm over the last dims `normalized_shape`; the result has the input's shape and dtype."""
    return F.rms_norm(input, list(normalized_shape), weight, eps)

"""Dtypes of sums on a device type, and the loops of its optimizers."""

from __future__ import annotations

from functools import cache

import torch

from ..torch_internals.tensors import DisableTorchFunction
from .machine import in_torch, module_of

__all__ = ["autocast_sums_stay_wide", "has_double", "updates_lists"]


def autocast_sums_stay_wide(device_type: str) -> bool:
    """Returns whether autocast is on for a device type, and leaves sums of half precision in float32, as on CUDA."""
    if device_type == "cpu" or not torch.amp.is_autocast_available(device_type):
        return False
    return torch.is_autocast_enabled(device_type) and (device_type == "cuda" or _sums_are_wide(device_type))


def has_double(device_type: str) -> bool:
    """Returns whether sums on a device type can be computed in float64."""
    return device_type in ("cpu", "cuda", "meta")


def updates_lists(device_type: str) -> bool:
    """Returns whether torch's optimizers update parameters of a device type as lists by default (foreach)."""
    outside = module_of(device_type) is not None and not in_torch(device_type)
    return device_type in ("cuda", "xpu", "mtia") or outside


@cache
def _sums_are_wide(device_type: str) -> bool:
    with DisableTorchFunction(), torch.no_grad(), torch.autocast(device_type):
        return torch.zeros(1, dtype=torch.bfloat16, device=device_type).sum().dtype is torch.float32

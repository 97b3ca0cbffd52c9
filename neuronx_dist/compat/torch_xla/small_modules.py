"""Small modules of torch_xla: checkpoint, serialization, metrics, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...spmd.random import checkpoint as _checkpoint
from .groups import local_device
from .xla_model import save as _save

__all__ = [
    "autocast",
    "checkpoint",
    "clear_all",
    "clear_counters",
    "counter_names",
    "counter_value",
    "load",
    "metric_data",
    "metric_names",
    "metrics_report",
    "save",
    "short_metrics_report",
]


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """Calls `function`, whose activations backward recomputes, with all random streams replayed."""
    kwargs.pop("preserve_rng_state", None)
    return _checkpoint(function, *args, **kwargs)


def save(data: Any, path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """Saves data as one file, by `torch.save`, on the first rank."""
    _save(data, path, master_only, global_master)


def load(path: Any) -> Any:
    """Loads a file of `save`, to the CPU."""
    return torch.load(path, map_location="cpu", weights_only=True)


def autocast(device: Any = None, enabled: bool = True, dtype: Any = None, cache_enabled: bool = True) -> torch.autocast:
    """Returns torch's autocast for this rank's device."""
    return torch.autocast(
        local_device().type, dtype=dtype or torch.bfloat16, enabled=enabled, cache_enabled=cache_enabled
    )


def metrics_report() -> str:
    """Returns a text: there are no metrics of a compiler."""
    return "torch_xla is not installed: there are no metrics"


short_metrics_report = metrics_report


def counter_names() -> list[str]:
    """Returns no names."""
    return []


metric_names = counter_names


def counter_value(name: str) -> None:
    """Returns None: there is no such counter."""


metric_data = counter_value


def clear_all() -> None:
    """Does nothing."""


clear_counters = clear_all

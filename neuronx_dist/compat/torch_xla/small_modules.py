"""Small modules of torch_xla: checkpoint, serialization, metrics, profiler, autocast, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW

from ...spmd.random import checkpoint as _checkpoint
from .groups import local_device
from .xla_model import save as _save

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "StepTrace",
    "Trace",
    "autocast",
    "checkpoint",
    "clear_all",
    "clear_counters",
    "clear_metrics",
    "counter_names",
    "counter_value",
    "executed_fallback_ops",
    "load",
    "metric_data",
    "metric_names",
    "metrics_report",
    "save",
    "short_metrics_report",
    "start_server",
    "start_trace",
    "stop_trace",
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


metric_names = executed_fallback_ops = counter_names


def counter_value(name: str) -> None:
    """Returns None: there is no such counter."""


metric_data = counter_value


def clear_all() -> None:
    """Does nothing."""


clear_counters = clear_metrics = clear_all


class Trace(torch.profiler.record_function):
    """A range of torch.profiler, by the name of torch_xla's."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name)


class StepTrace(Trace):
    """A step as a range of torch.profiler."""

    def __init__(self, name: str, step_num: int = 0, **kwargs: Any) -> None:
        super().__init__(f"{name} {step_num}")


def start_server(port: int, only_on_master: bool = True) -> None:
    """Does nothing: torch.profiler needs no server."""


def start_trace(log_dir: Any) -> None:
    """Refuses torch_xla's profiler.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "torch_xla.debug.profiler.start_trace: use torch.profiler.profile, which shows Trace and StepTrace"
    )


def stop_trace() -> None:
    """Does nothing: there is no trace."""

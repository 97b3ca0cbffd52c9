"""Streams and events of a device type, and host memory for its copies."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .machine import current_type, in_use, module_of

__all__ = ["has_streams", "is_copied_aside", "pins_memory", "synchronize", "timing_event"]


def has_streams(device_type: str) -> bool:
    """Returns whether kernels of a device type run on streams, beside the host: CUDA and others, but no CPU or XLA."""
    names = ("Event", "Stream", "current_stream", "stream")
    module = module_of(device_type)
    return device_type != "cpu" and all(hasattr(module, name) for name in names)


def is_copied_aside(device_type: str) -> bool:
    """Returns whether a thread can copy tensors of a device type to the host while the next step is computed."""
    return device_type == "cpu" or has_streams(device_type)


def pins_memory() -> bool:
    """Returns whether host memory can be pinned for copies from this machine's accelerator."""
    device_type = current_type()
    if device_type is None or device_type == "cuda":
        return device_type is not None
    return in_use() == device_type and _pins(device_type)


def synchronize(device_type: str) -> None:
    """Waits until the devices of a type have finished what was launched; returns at once where nothing can wait."""
    module = module_of(device_type)
    if device_type != "cpu" and hasattr(module, "synchronize"):
        module.synchronize()


def timing_event(device_type: str) -> Any:
    """Returns an event that can be recorded on the current stream and timed; None where a device has none."""
    module = module_of(device_type)
    if device_type == "cpu" or not hasattr(module, "Event"):
        return None
    try:
        return module.Event(enable_timing=True)
    except (NotImplementedError, RuntimeError, TypeError):
        return None


@cache
def _pins(device_type: str) -> bool:
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except (NotImplementedError, RuntimeError):
        return False

"""The state of an accelerator's default random generator."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from .machine import in_use, module_of

__all__ = ["random_state", "random_state_restored", "set_random_state"]


def random_state() -> torch.Tensor | None:
    """Returns the state of the accelerator's default generator; None: no accelerator is in use, or it has no state."""
    device_type = in_use()
    if device_type is None:
        return None
    module = module_of(device_type)
    if not hasattr(module, "get_rng_state"):
        _warn_of_state(device_type)
        return None
    state: torch.Tensor = module.get_rng_state()
    return state


@contextmanager
def random_state_restored() -> Iterator[None]:
    """Restores torch's default generators on exit: those of the CPU, of all GPUs, or of another accelerator in use."""
    device = torch.accelerator.current_accelerator()
    if device is None or device.type == "cuda":
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
        return
    before = random_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if before is not None:
            set_random_state(before)


def set_random_state(state: torch.Tensor) -> None:
    """Sets what `random_state` returned; does nothing on a machine without an accelerator."""
    device = torch.accelerator.current_accelerator()
    module = None if device is None else module_of(device.type)
    if module is not None and hasattr(module, "set_rng_state"):
        module.set_rng_state(state)


@cache
def _warn_of_state(device_type: str) -> None:
    warnings.warn(
        f"torch.{device_type} has no get_rng_state: random numbers drawn on the device are not part of checkpoints, "
        "and activation checkpointing redraws other ones; draw them on the CPU, or set dropout to 0",
        stacklevel=3,
    )

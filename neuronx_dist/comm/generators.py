"""The state of a device's default random generator, whatever the device: CPU, an accelerator, an XLA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .. import accelerator
from . import context
from .base import DeviceGenerator
from .rank_selection import XLA

__all__ = ["State", "as_they_were", "autocast", "device_has_own_program", "get_state", "seed", "set_state"]

State = list[torch.Tensor]  # of the CPU generator and, if one is in use, of the accelerator's or XLA device's generator


def _device_generator() -> DeviceGenerator | None:
    return context.current().backend.generator if context.is_initialized() else None


def device_has_own_program() -> bool:
    """Returns whether the current rank is an XLA device.

    Its backward runs in another thread, on a generator that torch does not know.
    """
    return _device_generator() is not None


def seed(value: int) -> None:
    """Seeds the default generators."""
    torch.manual_seed(value)
    generator = _device_generator()
    if generator is not None:
        generator.set_state(torch.tensor([value]))


def get_state() -> State:
    """Returns the states of the default generators."""
    state = [torch.get_rng_state()]
    generator = _device_generator()
    if generator is not None:
        state.append(generator.get_state())
    elif (on_accelerator := accelerator.random_state()) is not None:
        state.append(on_accelerator)
    return state


def set_state(state: State) -> None:
    """Sets the states that `get_state` returned.

    Raises:
        ValueError: one of the two devices is an XLA device and the other is not.
    """
    generator, of_xla = _device_generator(), len(state) > 1 and state[1].dtype == torch.int64
    if (generator is not None) != of_xla:
        kinds = {True: "an XLA device", False: "a device other than XLA"}
        raise ValueError(
            f"a random state of {kinds[of_xla]} cannot be set on {kinds[not of_xla]}, which draws other numbers: "
            "call model_parallel_manual_seed(seed) instead"
        )
    torch.set_rng_state(state[0])
    if generator is not None:
        generator.set_state(state[1])
    elif len(state) > 1:
        accelerator.set_random_state(state[1])


def autocast() -> tuple[bool, torch.dtype]:
    """Returns whether, and to which dtype, operations on an XLA device are cast."""
    return torch.is_autocast_enabled(XLA), torch.get_autocast_dtype(XLA)


@contextmanager
def as_they_were(state: State, cast: tuple[bool, torch.dtype]) -> Iterator[None]:
    """Restores the default generators, and an XLA device's autocast, on exit."""
    now = get_state()
    set_state(state)
    try:
        with torch.autocast(XLA, dtype=cast[1], enabled=cast[0]):
            yield
    finally:
        set_state(now)

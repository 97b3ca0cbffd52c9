"""The state of a device's default random generator, whatever the device: CPU, an accelerator, an XLA device."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import accelerator
from . import context
from .base import DeviceGenerator
from .rank_selection import XLA

__all__ = [
    "ProcessGenerators",
    "State",
    "as_they_were",
    "autocast",
    "device_has_own_program",
    "get_state",
    "seed",
    "set_state",
]

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


class ProcessGenerators:
    """The generators that threads of a process share: torch's, the accelerator's, Python's and numpy's.

    Threads that take turns exchange the states at each turn. Reading numpy's state takes 40 microseconds, so it is read
    only if the memory of the generator has changed.
    """

    _MT19937 = 625 * 4  # bytes of numpy's `mt19937_state`: 624 words and a position

    def __init__(self) -> None:
        self._numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
        self._python_state = random.getstate()
        self._numpy_state: Any = None if self._numpy is None else self._numpy.get_state(legacy=False)
        self._numpy_memory = self._memory()

    def state(self) -> tuple[Any, ...]:
        """Returns the states of all generators."""
        self._python_state = random.getstate()
        # A normal number that was drawn with the last one, and waits, is not in the memory of the generator.
        if self._numpy is not None and (self._numpy_state["has_gauss"] or self._numpy_memory != self._memory()):
            self._numpy_state, self._numpy_memory = self._numpy.get_state(legacy=False), self._memory()
        return torch.get_rng_state(), accelerator.random_state(), self._python_state, self._numpy_state

    def restore(self, state: tuple[Any, ...]) -> None:
        """Sets the states that `state` returned; nothing may have been drawn since its last call."""
        on_cpu, on_accelerator, of_python, of_numpy = state
        torch.set_rng_state(on_cpu)
        if on_accelerator is not None:
            accelerator.set_random_state(on_accelerator)
        if of_python != self._python_state:
            random.setstate(of_python)
            self._python_state = of_python
        if of_numpy is not self._numpy_state:
            self._numpy.set_state(of_numpy)
            self._numpy_state, self._numpy_memory = of_numpy, self._memory()

    def _memory(self) -> Any:
        """Returns the bytes of numpy's generator; an object equal to no other where their layout is not known."""
        if self._numpy is None:
            return None
        generator = self._numpy.get_bit_generator()
        if not isinstance(generator, self._numpy.MT19937):
            return object()
        return ctypes.string_at(generator.ctypes.state_address, self._MT19937)

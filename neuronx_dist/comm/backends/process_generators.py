"""The states of the random generators of a process, exchanged by ranks that are threads of it."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

import torch

from ... import accelerator

__all__ = ["ProcessGenerators"]


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

"""States of the global generators of random numbers, to compare and restore."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import torch

__all__ = ["RandomState"]


class RandomState:
    """The states of the global generators of Python, numpy and torch (on the host), to compare and restore.

    Ranks that are threads share these: there nothing counts as changed, nor is anything restored.
    """

    def __init__(self) -> None:
        self._shared = threading.current_thread() is not threading.main_thread()
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random
        self._torch = torch.get_rng_state()
        self._states = self._now()

    def _now(self) -> dict[str, Any]:
        states: dict[str, Any] = {"random": random.getstate()}
        if self._numpy is not None:
            name, words, *others = self._numpy.get_state()
            states["numpy.random"] = (name, tuple(words.tolist()), *others)
        return states

    def changed(self) -> list[str]:
        """Returns the names of the generators that are in another state now."""
        if self._shared:
            return []
        now = self._now()
        names = [name for name, state in self._states.items() if state != now[name]]
        return names if torch.equal(self._torch, torch.get_rng_state()) else [*names, "torch"]

    def restore(self) -> None:
        if self._shared:
            return
        random.setstate(self._states["random"])
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            self._numpy.set_state(self._states["numpy.random"])

    def seed_otherwise(self) -> None:
        """Puts the generators of Python and numpy into states that are neither this one nor the present one."""
        random.seed(random.getrandbits(64))
        if self._numpy is not None:
            self._numpy.seed(random.getrandbits(32))

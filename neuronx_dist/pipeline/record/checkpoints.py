"""Activation checkpoints that a forward puts around several calls: which of them a call lies in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Checkpoints"]


class Checkpoints:
    """Numbers the checkpoints of one forward, torch's of both kinds and our own."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}  # by what identifies a checkpoint, which is kept: an id may be used again
        self._reentrant: list[int] = []

    def innermost(self) -> int | None:
        """The number of the checkpoint that is running; None outside of all."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        # Without reentrance torch sees tensors that are saved by a hook, made anew for each checkpoint.
        if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook."):
            return self._number(hooks[0])
        return self._reentrant[-1] if self._reentrant else None

    def run_reentrant(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """What `CheckpointFunction.apply` is given, run with gradients, which it switches off."""
        self._reentrant.append(self._number(object()))
        try:
            return function(*args)
        finally:
            self._reentrant.pop()

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

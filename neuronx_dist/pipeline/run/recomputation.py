"""Activation checkpointing under a backward in halves: what is recomputed in the first half serves the second, too.

`torch.utils.checkpoint` (not its reentrant form) saves nothing in forward, and recomputes a layer when a backward first
asks for a saved tensor of it; each is there once, for that backward. A second backward would recompute the layer again.
So the tensors that the second half asks for, too, are kept beside: `kept_for_later` marks who asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

__all__ = ["Checkpoints", "kept_for_later", "seen_checkpoints"]

_HOOK: Any = torch.utils.checkpoint._checkpoint_hook  # type: ignore[attr-defined]
_lock = threading.Lock()
_local = threading.local()  # .checkpoints: of the forward that runs in this thread; .keeps: whether what is asked is kept
_users = 0


class Checkpoints:
    """Whether a forward had any.

    Attributes:
        any: of this forward.
    """

    any = False


class _Saved:
    """A tensor that is recomputed when it is asked for."""

    __slots__ = ("holder", "tensor")

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.tensor: torch.Tensor | None = None


class _KeepingHook(_HOOK):  # type: ignore[misc]
    """Torch's hook on what is saved in a checkpointed region, which recomputes; it gives a tensor that is kept again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        checkpoints: Checkpoints | None = getattr(_local, "checkpoints", None)
        if checkpoints is None:
            return  # another thread's forward
        checkpoints.any = True
        pack, recompute = self.pack_hook, self.unpack_hook

        def unpack(saved: _Saved) -> torch.Tensor:
            if saved.tensor is not None:
                return saved.tensor
            tensor: torch.Tensor = recompute(saved.holder)
            if getattr(_local, "keeps", False):
                saved.tensor = tensor
            return tensor

        self.pack_hook = lambda x: _Saved(pack(x))
        self.unpack_hook = unpack


@contextmanager
def seen_checkpoints() -> Iterator[Checkpoints]:
    """Around a forward, in this thread: afterwards it says whether something is to be recomputed."""
    global _users
    with _lock:
        _users += 1
        torch.utils.checkpoint._checkpoint_hook = _KeepingHook  # type: ignore[attr-defined]
    before = getattr(_local, "checkpoints", None)
    _local.checkpoints = Checkpoints()
    try:
        yield _local.checkpoints
    finally:
        _local.checkpoints = before
        with _lock:
            _users -= 1
            if not _users:
                torch.utils.checkpoint._checkpoint_hook = _HOOK  # type: ignore[attr-defined]


@contextmanager
def kept_for_later() -> Iterator[None]:
    """Saved tensors that are asked for inside are kept until their node is freed."""
    _local.keeps = True
    try:
        yield
    finally:
        _local.keeps = False

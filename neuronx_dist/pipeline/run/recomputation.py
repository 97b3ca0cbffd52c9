"""Activation checkpointing under a backward in halves: what is recomputed in the first half serves the second, too.

`torch.utils.checkpoint` recomputes a layer when a backward first asks for what the layer saved, and gives it once: the
second half would recompute the layer again. So what the second half asks for, too, is kept beside (`keep_for_later`).

Its reentrant form runs a backward of its own inside of the outer one, which nobody can divide. In forwards whose
backward is divided it is replaced by the other form, which computes the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from ...shared_context import Replacement

__all__ = ["Checkpoints", "keep_for_later", "keep_no_more", "seen_checkpoints"]

_torch: Any = torch.utils.checkpoint  # whose names are replaced while a forward is seen
_local = threading.local()  # .checkpoints: of the forward of this thread; .keeps: whether what is asked for is kept


class Checkpoints:
    """What a forward had of checkpoints.

    Attributes:
        any: whether something will be recomputed.
    """

    any = False


class _Saved:
    """A tensor that is recomputed when it is asked for."""

    __slots__ = ("holder", "tensor")

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.tensor: torch.Tensor | None = None


def _keeping_hook(*args: Any) -> Any:
    """Torch's hook on what a checkpointed region saves, which recomputes it; what is kept is given again."""
    hook = _replacement.before["_checkpoint_hook"](*args)
    checkpoints = _here()
    if checkpoints is None:
        return hook
    checkpoints.any = True
    pack, recompute = hook.pack_hook, hook.unpack_hook

    def unpack(saved: _Saved) -> torch.Tensor:
        if saved.tensor is not None:
            return saved.tensor
        tensor: torch.Tensor = recompute(saved.holder)
        if getattr(_local, "keeps", False):
            saved.tensor = tensor
        return tensor

    hook.pack_hook = lambda x: _Saved(pack(x))
    hook.unpack_hook = unpack
    return hook


class _NotReentrant:
    """In the place of torch's function: runs a checkpoint that asks for the reentrant form in the other one."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if _here() is None:
            return _replacement.before["CheckpointFunction"].apply(function, preserve_rng_state, *args)
        return _torch.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


_replacement = Replacement(_torch, _checkpoint_hook=_keeping_hook, CheckpointFunction=_NotReentrant)


def _here() -> Checkpoints | None:
    """Those of the forward of this thread, if its backward is divided."""
    return getattr(_local, "checkpoints", None)


@contextmanager
def seen_checkpoints() -> Iterator[Checkpoints]:
    """Around a forward, in this thread: its checkpoints serve two halves. It says afterwards whether there are any."""
    before = _here()
    with _replacement:
        _local.checkpoints = Checkpoints()
        try:
            yield _local.checkpoints
        finally:
            _local.checkpoints = before


def keep_for_later(*_: Any) -> None:
    """From here on, in this thread: what is recomputed, or given, is kept until the node that saved it is freed."""
    _local.keeps = True


def keep_no_more(*_: Any) -> None:
    """Until here. Both can be hooks of nodes."""
    _local.keeps = False

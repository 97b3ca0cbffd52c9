"""Activation checkpointing under a backward in halves: tensors recomputed in the first half serve the second, too.

`torch.utils.checkpoint` recomputes a layer when a backward first asks for a saved tensor, and returns each tensor once:
the second half would recompute the layer again. So tensors that the second half needs are stored (`keep_for_later`).

The reentrant form of a checkpoint runs a backward inside of the outer one, which cannot be divided. In forwards whose
backward is divided it is replaced by the other form, which computes the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint

from ...spmd.checkpoint_hooks import treated_checkpoints

__all__ = ["CheckpointsSeen", "keep_for_later", "keep_no_more", "seen_checkpoints"]

_local = threading.local()  # .keeps: whether recomputed tensors are stored


class CheckpointsSeen:
    """The activation checkpoints of one forward.

    Attributes:
        any: whether something will be recomputed.
    """

    any = False


class _SavedTensor:
    """A saved tensor that is recomputed on access; `tensor` is set once it is stored."""

    __slots__ = ("holder", "tensor")

    def __init__(self, holder: Any) -> None:
        self.holder = holder
        self.tensor: torch.Tensor | None = None


@contextmanager
def seen_checkpoints() -> Iterator[CheckpointsSeen]:
    """Wraps checkpoints of a forward so that tensors recomputed in the input half can serve the weight half."""
    checkpoints = CheckpointsSeen()

    def keeping(hook: Any) -> Any:
        """Makes torch's hook return a stored tensor in place of recomputing it."""
        checkpoints.any = True
        pack, recompute = hook.pack_hook, hook.unpack_hook

        def unpack(saved: _SavedTensor) -> torch.Tensor:
            if saved.tensor is not None:
                return saved.tensor
            tensor: torch.Tensor = recompute(saved.holder)
            if getattr(_local, "keeps", False):
                saved.tensor = tensor
            return tensor

        hook.pack_hook = lambda x: _SavedTensor(pack(x))
        hook.unpack_hook = unpack
        return hook

    with treated_checkpoints(keeping, _not_reentrant):
        yield checkpoints


def _not_reentrant(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
    """Runs a reentrant checkpoint in the other form."""
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state
    )


def keep_for_later(*_: Any) -> None:
    """Keeps recomputed tensors from here on, in this thread, until the node that saved them is freed."""
    _local.keeps = True


def keep_no_more(*_: Any) -> None:
    """Ends `keep_for_later`. Both can be hooks of nodes."""
    _local.keeps = False

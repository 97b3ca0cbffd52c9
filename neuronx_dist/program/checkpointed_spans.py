"""Activation checkpoints that a forward puts around several calls: the numbers of those around each call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..spmd import random
from ..torch_internals.autograd import (
    checkpoint_context,
    is_checkpoint_hook,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)
from ..torch_internals.tensors import pytree
from .recording import TracingError

__all__ = ["Checkpoints"]

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]


class Checkpoints:
    """Numbers the checkpoints of one forward: both kinds of torch's, and this package's."""

    def __init__(self, *, strict: bool) -> None:
        """`strict`: refuse checkpoints and hooks that an emitted program would not reproduce."""
        self._strict = strict
        self._numbers: dict[Any, int] = {}  # by an object that identifies a checkpoint and must stay alive
        self._reentrant: list[tuple[int, int]] = []  # (number of the checkpoint, number of hooks around it)
        self._around = len(_hooks())  # hooks that the recorder's caller installed

    def running(self, where: str) -> tuple[int, ...]:
        """Returns the numbers of the checkpoints that are running, the outermost first.

        Raises:
            TracingError: a checkpoint has a `context_fn`, or other hooks see the tensors saved for backward.
        """
        numbers: list[int] = []
        waiting = list(self._reentrant)
        for depth, (pack, _) in enumerate(_hooks()[self._around :]):
            while waiting and waiting[0][1] <= depth:
                numbers.append(waiting.pop(0)[0])
            # torch implements a non-reentrant checkpoint by a hook on saved tensors, a new one for each checkpoint.
            if is_checkpoint_hook(pack):
                if self._strict and pack not in self._numbers:
                    _refuse_context(pack, where)
                numbers.append(self._number(pack))
            elif self._strict:
                name = getattr(getattr(pack, "func", pack), "__qualname__", repr(pack))  # of a partial too
                raise TracingError(
                    f"{where}: forward runs inside torch.autograd.graph.saved_tensors_hooks ({name}, as of save_on_cpu "
                    "and recompute(offload=True)), which the program would not run. Enter the hooks around the call of "
                    "the module, and leave out offload."
                )
        return (*numbers, *(number for number, _ in waiting))

    def run_reentrant(self, where: str, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Runs the function passed to `CheckpointFunction.apply`, with gradients on, which `apply` switches off.

        Raises:
            TracingError: the result requires a gradient and no argument does: torch would not compute it.
        """
        self._reentrant.append((self._number(object()), len(_hooks()) - self._around))
        try:
            result = function(*args)
        finally:
            self._reentrant.pop()
        if self._strict and not _require_gradients(args) and _require_gradients(pytree.tree_leaves(result)):
            raise TracingError(
                f"{where}: torch.utils.checkpoint(use_reentrant=True) gets no tensor that requires a gradient, so the "
                "parameters inside would get no gradients. Pass use_reentrant=False."
            )
        return result

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _hooks() -> list[_Hooks]:
    """Returns the hooks on saved tensors that are in effect in this thread, the outermost first."""
    stack: list[_Hooks] = []
    while (top := top_saved_tensors_hooks(False)) is not None:
        stack.append(top)
        pop_saved_tensors_hooks()
    stack.reverse()
    for hooks in stack:
        push_saved_tensors_hooks(*hooks)
    return stack


def _refuse_context(pack: Callable[..., Any], where: str) -> None:
    """Refuses a checkpoint with a `context_fn`: selective checkpoints, whose context decides which results stay."""
    context = checkpoint_context(pack)
    made_by = getattr(getattr(context, "func", None), "__module__", None)
    if isinstance(context, nullcontext) or made_by == random.__name__:
        return
    raise TracingError(
        f"{where}: torch.utils.checkpoint has a context_fn (or debug=True), which recomputes inside a "
        f"{type(context).__name__}, but the program recomputes everything in a checkpoint. Leave context_fn out, or "
        "let a policy choose what is recomputed: graph.recompute(nodes)."
    )


def _require_gradients(x: Any) -> bool:
    return any(isinstance(item, torch.Tensor) and item.requires_grad for item in x)

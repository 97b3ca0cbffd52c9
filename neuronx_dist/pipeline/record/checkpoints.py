"""Activation checkpoints that a forward puts around several calls: which of them a call lies in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree

from ...spmd import random
from .recording import TracingError

__all__ = ["Checkpoints"]

_Hooks = tuple[Callable[..., Any], Callable[..., Any]]


class Checkpoints:
    """Numbers the checkpoints of one forward, torch's of both kinds and our own."""

    def __init__(self, *, strict: bool) -> None:
        """`strict`: refuse what would not be run as it is written."""
        self._strict = strict
        self._numbers: dict[Any, int] = {}  # by what identifies a checkpoint, which is kept: an id may be used again
        self._reentrant: list[tuple[int, int]] = []  # the number of each, and how many hooks are around it
        self._around = len(_hooks())  # hooks of whoever records

    def running(self, where: str) -> tuple[int, ...]:
        """The numbers of the checkpoints that are running, the outermost first.

        Raises:
            TracingError: one is of a form that is not kept, or other hooks see what is saved for backward.
        """
        numbers: list[int] = []
        waiting = list(self._reentrant)
        for depth, (pack, _) in enumerate(_hooks()[self._around :]):
            while waiting and waiting[0][1] <= depth:
                numbers.append(waiting.pop(0)[0])
            # Without reentrance torch sees tensors that are saved by a hook, made anew for each checkpoint.
            if pack.__qualname__.startswith("_checkpoint_hook."):
                if self._strict and pack not in self._numbers:
                    _refuse_context(pack, where)
                numbers.append(self._number(pack))
            elif self._strict:
                raise TracingError(
                    f"{where}: forward runs inside of torch.autograd.graph.saved_tensors_hooks ({pack.__qualname__}; "
                    "save_on_cpu is one), which the program would not run. Put them around the call of the module."
                )
        return (*numbers, *(number for number, _ in waiting))

    def run_reentrant(self, where: str, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """What `CheckpointFunction.apply` is given, run with gradients, which it switches off.

        Raises:
            TracingError: no argument requires a gradient, and the result does: torch would give it none.
        """
        self._reentrant.append((self._number(object()), len(_hooks()) - self._around))
        try:
            result = function(*args)
        finally:
            self._reentrant.pop()
        if self._strict and not _require_gradients(args) and _require_gradients(pytree.tree_leaves(result)):
            raise TracingError(
                f"{where}: torch.utils.checkpoint(use_reentrant=True) gets no tensor that requires a gradient, so that "
                "the parameters inside of it would get none. Pass use_reentrant=False."
            )
        return result

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def _hooks() -> list[_Hooks]:
    """The hooks on saved tensors that are in effect in this thread, the outermost first."""
    stack: list[_Hooks] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        stack.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    stack.reverse()
    for hooks in stack:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
    return stack


def _refuse_context(pack: Callable[..., Any], where: str) -> None:
    """Refuses a checkpoint that has a `context_fn`: selective ones, whose context decides what is kept."""
    frame = _enclosed(pack, "frame")
    context = _enclosed(frame.recompute_fn, "recompute_context")
    made_by = getattr(getattr(context, "func", None), "__module__", None)
    if isinstance(context, nullcontext) or made_by == random.__name__:
        return
    raise TracingError(
        f"{where}: torch.utils.checkpoint has a context_fn (or debug=True), whose recomputation runs inside of a "
        f"{type(context).__name__}: the program recomputes all that is in a checkpoint. Leave context_fn out, or let a "
        "policy choose what is recomputed: graph.recompute(nodes)."
    )


def _enclosed(function: Callable[..., Any], name: str) -> Any:
    """What a function knows by this name from around it."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents


def _require_gradients(x: Any) -> bool:
    return any(isinstance(item, torch.Tensor) and item.requires_grad for item in x)

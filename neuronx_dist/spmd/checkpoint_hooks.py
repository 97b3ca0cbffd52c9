"""Changes how activation checkpoints of `torch.utils.checkpoint` run, in one thread, while a `with` lasts.

torch offers no hook for that. Two names in its module are replaced:

    _checkpoint_hook      makes the hooks on saved tensors of a checkpoint that is not reentrant
    CheckpointFunction    is the autograd function of a reentrant one

A backward in halves keeps what a checkpoint recomputes; a comparison of values runs without any recomputation. Nothing
is changed in torch while no thread is inside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from ..shared_context import Replacement
from ..torch_internals.autograd import CHECKPOINT_HOOK

__all__ = ["treated_checkpoints"]

_module: Any = torch.utils.checkpoint
_local = threading.local()  # .treatment: of this thread; None outside of a `with`


class _Treatment(NamedTuple):
    hooks: Callable[[Any], Any]
    reentrant: Callable[..., Any]


@contextmanager
def treated_checkpoints(hooks: Callable[[Any], Any], reentrant: Callable[..., Any]) -> Iterator[None]:
    """Makes checkpoints inside the `with`, in this thread, run as the innermost of these calls says.

    Args:
        hooks: takes torch's `saved_tensors_hooks` of a checkpoint; returns the hooks to use.
        reentrant: runs a reentrant checkpoint, `reentrant(function, preserve_rng_state, *args)`.
    """
    before = _treatment()
    with _replacement:
        _local.treatment = _Treatment(hooks, reentrant)
        try:
            yield
        finally:
            _local.treatment = before


def _treatment() -> _Treatment | None:
    return getattr(_local, "treatment", None)


def _hook(*args: Any) -> Any:
    hook, treatment = _replacement.before[CHECKPOINT_HOOK](*args), _treatment()
    return hook if treatment is None else treatment.hooks(hook)


class _Reentrant:
    """Replaces torch's autograd function."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        treatment = _treatment()
        run = _replacement.before["CheckpointFunction"].apply if treatment is None else treatment.reentrant
        return run(function, preserve_rng_state, *args)


_replacement = Replacement(_module, **{CHECKPOINT_HOOK: _hook, "CheckpointFunction": _Reentrant})

"""Losses of this package: their arguments are checked before their bodies are followed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .... import comm
from ....parallel_layers.loss_functions import parallel_cross_entropy
from ....spmd.axes import atoms_of
from ....spmd.types import UNIFORM, Shard, V
from ....spmd.watching import HANDLERS
from ..messages.loss_errors import logits_error
from ..session import Session

_follow = HANDLERS[parallel_cross_entropy]


def _cross_entropy(mode: Session, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Checks that the logits of a vocabulary-parallel loss are each rank's part of the vocabulary."""
    logits = args[0]
    note = mode.note(logits, func.__name__)
    communicator = comm.communicator(kwargs.get("tensor_model_parallel_group") or "tp")
    for axis in atoms_of(communicator, mode.mesh) if note is not None and communicator.size > 1 else ():
        actual = note.type.get(axis)  # type: ignore[union-attr]
        of_vocabulary = isinstance(actual, Shard) and (actual.dim, actual.stride) == (logits.dim() - 1, 1)
        if not (actual is None or actual is V or actual is UNIFORM or actual.letter == "0" or of_vocabulary):
            raise logits_error(mode, func.__name__, logits, note.type, axis)  # type: ignore[union-attr]
    assert _follow is not None
    return _follow(mode, func, args, kwargs)


HANDLERS[parallel_cross_entropy] = _cross_entropy

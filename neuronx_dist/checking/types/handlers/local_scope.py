"""The inside of `spmd.local_map`: along some axes a shard is this rank's own numbers, of type V.

Inside, the mode has another session number, so that the first use of a tensor from outside (`note`) gives it a type
without shards. At the end the tensor gets its former type back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ....spmd.tensor_type import NOTE, Note, TensorType
from ....spmd.types import Shard, V
from ..session import Session, new_session

__all__ = ["LocalScope", "local_scope"]


class LocalScope:
    """The notes of tensors outside of an entered scope."""

    def __init__(self, mode: Session, axes: Collection[str]) -> None:
        self.mode, self.axes = mode, axes
        self.session, self.outer = mode.session, mode.scope
        self.known: list[tuple[Tensor, Any]] = []

    def take(self, x: Tensor, function: str) -> None:
        """Writes on a tensor from outside the type that it has inside."""
        mode = self.mode
        inside = mode.session, mode.scope
        mode.session, mode.scope = self.session, self.outer
        try:
            note: Note | None = mode.note(x, function)
        finally:
            mode.session, mode.scope = inside
        if note is None:
            return
        self.known.append((x, x.__dict__[NOTE]))
        types = {a: V if isinstance(t, Shard) and a in self.axes else t for a, t in note.type}
        mode.stamp(x, TensorType.of(types, note.type.rest), note.origins, note.extra)

    def give_back(self) -> None:
        """Restores the types of tensors from outside; writes meanwhile are found by their version."""
        for x, fields in self.known:
            x.__dict__[NOTE] = fields


@contextmanager
def local_scope(mode: Session, axes: Collection[str]) -> Iterator[None]:
    """Enters a scope of `local_map`."""
    scope = LocalScope(mode, axes)
    mode.session, mode.scope = new_session(), scope
    try:
        yield
    finally:
        mode.session, mode.scope = scope.session, scope.outer
        scope.give_back()

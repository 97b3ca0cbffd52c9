"""Whether a type checker is at work in this thread, and what the package tells it.

Nothing here knows the checker: `SpmdTypeMode` enters itself in this thread's list of watchers. Functions that types
treat in a way of their own are registered in `HANDLERS`, by the room that has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor

from ..mesh import Mesh
from .tensor_type import Note, TensorType

__all__ = ["HANDLERS", "Handler", "Watcher", "active", "entered", "left", "no_typecheck", "see_through"]


class Watcher(Protocol):
    """What declarations ask of the checker that is at work."""

    mesh: Mesh | None
    level: str
    session: int
    paused: int

    def note(self, x: Tensor, function: str) -> Note | None:
        """What is known of a tensor now: a write through another view of its memory may have changed it."""

    def trust(self, text: str) -> None:
        """Records a declaration that is taken at its word."""

    def adopt(self, param: Tensor, grad: Tensor) -> Tensor:
        """Backward accumulates the gradient of `param` in `grad`."""

    def stamp(self, x: Tensor, type_: TensorType, origins: Any = None, extra: Any = None) -> None:
        """Writes a type on a tensor."""

    def local_scope(self, axes: Collection[str]) -> AbstractContextManager[None]:
        """Inside, what is sharded over `axes` is this rank's own numbers, and merely varies."""

    def pause(self) -> AbstractContextManager[None]:
        """Switches the checker off for what runs inside."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...


Handler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Functions that types treat in a way of their own; None: those that have nothing to do with types.
HANDLERS: dict[Callable[..., Any], Handler | None] = {}

_local = threading.local()


def active() -> Watcher | None:
    """The innermost type checker of this thread, unless it is paused."""
    watcher: Watcher | None = getattr(_local, "watcher", None)
    return None if watcher is None or watcher.paused else watcher


def entered(watcher: Watcher) -> Watcher | None:
    """Makes `watcher` the innermost one of this thread; returns the one before, for `left`."""
    before: Watcher | None = getattr(_local, "watcher", None)
    _local.watcher = watcher
    return before


def left(before: Watcher | None) -> None:
    """Makes the one before the innermost again."""
    _local.watcher = before


def see_through(function: Callable[..., Any], body: Callable[..., Any]) -> None:
    """For a function that hands itself to torch function modes: the checker follows `body`, with the same arguments."""

    def handler(mode: Watcher, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return body(*args, **kwargs)

    HANDLERS[function] = handler


@contextmanager
def no_typecheck() -> Iterator[None]:
    """Inside of a mode: what runs in here is not looked at, and its results have no types."""
    mode = active()
    if mode is None:
        yield
        return
    with mode.pause():
        yield

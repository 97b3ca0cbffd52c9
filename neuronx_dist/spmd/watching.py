"""The type checker that is active in this thread, and the declarations of the package for it.

This file does not import the checker: `SpmdTypeMode` enters itself in this thread's list of watchers. Functions with a
handler in the checker are registered in `HANDLERS`, by the room that has them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager
from typing import Any, Protocol

from torch import Tensor

from ..lazy_names import lazy_names
from ..mesh import Mesh
from .tensor_type import Note, TensorType

__all__ = ["HANDLERS", "Handler", "Watcher", "active", "entered", "left", "no_typecheck", "see_through"]


class Watcher(Protocol):
    """Interface of the active checker for declarations."""

    mesh: Mesh | None
    level: str
    session: int
    paused: int

    def note(self, x: Tensor, function: str) -> Note | None:
        """Returns the current note of a tensor, which a write through another view of its memory may have changed."""

    def trust(self, text: str) -> None:
        """Records a declaration that is trusted."""

    def adopt(self, param: Tensor, grad: Tensor) -> Tensor:
        """Declares that backward accumulates the gradient of `param` in `grad`."""

    def stamp(self, x: Tensor, type_: TensorType, origins: Any = None, extra: Any = None) -> None:
        """Writes a type on a tensor."""

    def local_scope(self, axes: Collection[str]) -> AbstractContextManager[None]:
        """Makes S over `axes` V inside the `with`, where code works on this rank's shard."""

    def pause(self) -> AbstractContextManager[None]:
        """Switches the checker off inside the `with`."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...


Handler = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Handlers of functions without a rule; None: the function is irrelevant to types.
HANDLERS: dict[Callable[..., Any], Handler | None] = {}

_local = threading.local()
_late = lazy_names(__name__, {"unchecked": "spmd.boundaries"})


def active() -> Watcher | None:
    """Returns the innermost type checker of this thread, None if it is paused."""
    watcher: Watcher | None = getattr(_local, "watcher", None)
    return None if watcher is None or watcher.paused else watcher


def entered(watcher: Watcher) -> Watcher | None:
    """Makes `watcher` the innermost one of this thread; returns the one before, for `left`."""
    before: Watcher | None = getattr(_local, "watcher", None)
    _local.watcher = watcher
    return before


def left(before: Watcher | None) -> None:
    """Makes the watcher before it the innermost one again."""
    _local.watcher = before


def see_through(function: Callable[..., Any], body: Callable[..., Any]) -> None:
    """Makes the checker follow `body` where `function`, with these arguments, passes itself to torch function modes."""

    def handler(mode: Watcher, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with mode:
            return body(*args, **kwargs)

    HANDLERS[function] = handler


def no_typecheck(fn: Any = None, /, **types: Any) -> _GeneratorContextManager[None]:
    """Switches the checker off in the `with`, or in the decorated function: results have no types, but `out_types`."""
    return _unchecked() if fn is None and not types else _late("unchecked")(fn, **types)


@contextmanager
def _unchecked() -> Iterator[None]:
    mode = active()
    if mode is None:
        yield
        return
    with mode.pause():
        yield

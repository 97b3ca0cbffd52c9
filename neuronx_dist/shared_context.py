"""Changes of torch for all threads of the process, in force while any thread is inside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

__all__ = ["Replacement", "SharedContext"]


class SharedContext:
    """`with` it, from several threads: the first one to come enters the context, the last one to go leaves it.

    Args:
        make: returns the context; called when the first one comes.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._users = 0
        self._context: AbstractContextManager[Any]

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._context = self._make()
                self._context.__enter__()
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._context.__exit__(None, None, None)


class Replacement(SharedContext):
    """Attributes of modules or classes that are ours while any thread is inside.

    Args:
        owner: the module or class.
        ours: what stands there, by the attribute's name.

    Attributes:
        before: what stood there before, as `vars(owner)` has it: torch's own, or what others had put in its place.
    """

    def __init__(self, owner: Any, **ours: Any) -> None:
        super().__init__(self._replaced)
        self._owner, self._ours = owner, ours
        self.before = {name: vars(owner)[name] for name in ours}

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        for name, our in self._ours.items():
            now = vars(self._owner)[name]
            if now is not our:  # else others saw ours, and restored it after we had left
                self.before[name] = now
            setattr(self._owner, name, our)
        try:
            yield
        finally:
            for name, original in self.before.items():
                setattr(self._owner, name, original)

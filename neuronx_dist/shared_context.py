"""Changes of torch for all threads of the process, in force while any thread is inside."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

__all__ = ["Replacement", "SharedContext"]


class SharedContext:
    """A context for several threads: the first thread in enters it, the last thread out leaves it.

    Args:
        make: returns the context; called for the first thread.
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
    """Replaces attributes of a module or class while any thread is inside.

    Args:
        owner: the module or class.
        ours: the replacements, by the attribute's name.

    Attributes:
        before: the replaced values, as in `vars(owner)`: torch's, or those that others had put in their place.
    """

    def __init__(self, owner: Any, **ours: Any) -> None:
        super().__init__(self._replaced)
        self._owner, self._ours = owner, ours
        self.before = {name: vars(owner)[name] for name in ours}

    @contextmanager
    def _replaced(self) -> Iterator[None]:
        for name, our in self._ours.items():
            now = vars(self._owner)[name]
            if now is not our:  # else others saved ours, and restored it after the last thread had left
                self.before[name] = now
            setattr(self._owner, name, our)
        try:
            yield
        finally:
            for name, original in self.before.items():
                setattr(self._owner, name, original)

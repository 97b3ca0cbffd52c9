"""Sees calls of `torch.autograd.Function.apply`, which no TorchFunctionMode does: the recorder and the checker use it.

Nothing is changed in torch while nobody looks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["intercept"]

Hook = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

_APPLY = torch.autograd.Function.__dict__["apply"]
_lock = threading.Lock()
_local = threading.local()  # .hooks: of this thread
_users = 0


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    hooks = getattr(_local, "hooks", None)
    original = _APPLY.__get__(None, cls)
    if not hooks:
        return original(*args, **kwargs)
    return hooks[-1](original, cls, args, kwargs)


@contextmanager
def intercept(hook: Hook) -> Iterator[None]:
    """Inside, in this thread, `cls.apply(*args, **kwargs)` becomes `hook(original apply, cls, args, kwargs)`.

    The innermost hook is asked.
    """
    global _users
    with _lock:
        _users += 1
        torch.autograd.Function.apply = classmethod(_apply)  # type: ignore[assignment]
    hooks = _local.__dict__.setdefault("hooks", [])
    hooks.append(hook)
    try:
        yield
    finally:
        hooks.remove(hook)
        with _lock:
            _users -= 1
            if not _users:
                torch.autograd.Function.apply = _APPLY  # type: ignore[method-assign]

"""Interception of `torch.autograd.Function.apply`, which no TorchFunctionMode sees: for recorder and checker.

Nothing is changed in torch while nobody intercepts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..shared_context import Replacement

__all__ = ["apply_of", "intercept"]

Hook = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]

_local = threading.local()  # .hooks: the stack of this thread


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    hooks = getattr(_local, "hooks", None)
    original = apply_of(cls)
    if not hooks:
        return original(*args, **kwargs)
    return hooks[-1](original, cls, args, kwargs)


_replacement = Replacement(torch.autograd.Function, apply=classmethod(_apply))


def apply_of(cls: Any) -> Callable[..., Any]:
    """Returns torch's `apply`, bound to a function class, which no hook intercepts.

    torch's is a class method in Python (2.13) or in C (2.15), which has no `__func__`: both are descriptors.
    """
    return _replacement.before["apply"].__get__(None, cls)


@contextmanager
def intercept(hook: Hook) -> Iterator[None]:
    """Replaces `cls.apply(*args, **kwargs)` by `hook(original apply, cls, args, kwargs)`, in this thread.

    The innermost hook is called.
    """
    hooks = _local.__dict__.setdefault("hooks", [])
    with _replacement:
        hooks.append(hook)
        try:
            yield
        finally:
            hooks.remove(hook)

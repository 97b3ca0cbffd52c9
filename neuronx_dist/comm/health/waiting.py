"""Table of the waits of this rank's threads for other ranks.

A collective writes its wait into `waits`, in under a microsecond; other threads read the table (`places.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Operand", "Wait", "in_words", "noted", "numbers", "operand_of", "waits"]


class Operand(NamedTuple):
    """Description of one or several tensors, which does not reference them."""

    size: Sequence[int] | int  # a shape, or the number of tensors
    dtype: torch.dtype | None


class Group(Protocol):
    """Description of the ranks that wait; `ranks` is empty where they are not known."""

    ranks: tuple[int, ...]

    def describe(self, verb: str, site: str) -> str: ...


Wait = tuple[int, str, Any, Group]  # number, verb, operand (what `in_words` takes), group
waits: dict[int, Wait] = {}  # by the thread's identity
numbers = itertools.count()


def operand_of(x: Any) -> Operand:
    return Operand(x.shape, x.dtype) if isinstance(x, torch.Tensor) else Operand(len(x), x[0].dtype if x else None)


def in_words(verb: str, x: Any, detail: str = "") -> str:
    """Formats for messages: `all_reduce(sum) of [2, 3] float32`. `x`: a tensor, a list of them, an Operand or None."""
    text = f"{verb}({detail})" if detail else verb
    if x is None:
        return text
    size, dtype = x if isinstance(x, Operand) else operand_of(x)
    return f"{text} of {f'{size} tensors' if isinstance(size, int) else [*size]} {str(dtype).removeprefix('torch.')}"


class _Task:
    ranks: tuple[int, ...] = ()

    def describe(self, verb: str, site: str) -> str:
        return f"{verb} at {site}"


@contextmanager
def noted(what: str) -> Iterator[None]:
    """Registers that this thread waits for others to do `what`. (Hot paths write to `waits` directly.)"""
    waits[get_ident()] = (next(numbers), what, None, _Task())
    try:
        yield
    finally:
        waits.pop(get_ident(), None)

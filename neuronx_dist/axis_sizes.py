"""Sizes of axes that know that they are, for a tool that follows what a program computes with them.

Nothing here knows the tool: inside of `tracked`, in this thread, `Mesh.size`, `comm.size` and `Communicator.size` give
what its `number` makes of a size. Else they give plain ints, at the cost of one look.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

__all__ = ["size_along", "tracked", "tracking"]

Number = Callable[[int, Mapping[str, int]], int]
"""Of a number and the powers of the sizes of axes, by name, that it is a product of."""


class _Local(threading.local):
    number: Number | None = None


_local = _Local()


def tracking() -> bool:
    """Whether sizes of axes know that they are, in this thread."""
    return _local.number is not None


def size_along(sizes: Mapping[str, int], total: int) -> int:
    """The number `total` of ranks along some axes, whose `sizes` are given; a plain int where nobody tracks it."""
    number = _local.number
    exponents = {axis: 1 for axis, size in sizes.items() if size > 1} if number is not None else {}
    return number(total, exponents) if number is not None and exponents else total


@contextmanager
def tracked(number: Number) -> Iterator[None]:
    """Inside, in this thread, sizes of axes are what `number` makes of them."""
    before, _local.number = _local.number, number
    try:
        yield
    finally:
        _local.number = before

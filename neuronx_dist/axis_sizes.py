"""Sizes of axes as ints that know their axes, for a tool that follows computations with them.

This file does not import the tool: inside of `tracked`, in this thread, `Mesh.size`, `comm.size` and
`Communicator.size` return the result of its `number`. Otherwise they return plain ints, at the cost of one test.
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
    """Returns whether sizes of axes are tracked in this thread."""
    return _local.number is not None


def size_along(sizes: Mapping[str, int], total: int) -> int:
    """Returns `total`, the number of ranks along axes of these `sizes`; a plain int where nobody tracks sizes."""
    number = _local.number
    exponents = {axis: 1 for axis, size in sizes.items() if size > 1} if number is not None else {}
    return number(total, exponents) if number is not None and exponents else total


@contextmanager
def tracked(number: Number) -> Iterator[None]:
    """Makes sizes of axes, inside the `with` and in this thread, the results of `number`."""
    before, _local.number = _local.number, number
    try:
        yield
    finally:
        _local.number = before

"""The check under the names and defaults of `spmd_types.checker`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..spmd.local_code import local_map
from ..spmd.retyping import is_type_checking
from ..spmd.watching import active, no_typecheck
from .types.mode import SpmdTypeMode

__all__ = ["SpmdTypeMode", "is_type_checking", "local_map", "no_typecheck", "typecheck"]


@contextmanager
def typecheck(strict_mode: str | None = None, local: bool | None = None) -> Iterator[SpmdTypeMode]:
    """Checks types in the `with`; inside of another check it is that check, and nothing changes.

    Args:
        strict_mode: "strict" (None too): a tensor without a type is an error; "permissive": it counts as equal.
        local: True (None too): level L, on which shards are V; False: level G.

    Raises:
        ValueError: no such strict mode; or another `local` than that of the check around it.
    """
    if strict_mode not in (None, "strict", "permissive"):
        raise ValueError(f"typecheck: strict_mode is 'strict' or 'permissive', got {strict_mode!r}")
    around = active()
    if around is None:
        with SpmdTypeMode(level="G" if local is False else "L", strict=strict_mode != "permissive") as mode:
            yield mode
        return
    if local is not None and (around.level == "L") is not local:
        raise ValueError(
            f"typecheck(local={local}) inside of a check at level {around.level}: pass it to the outer one"
        )
    assert isinstance(around, SpmdTypeMode)
    strict, around.strict = around.strict, around.strict if strict_mode is None else strict_mode == "strict"
    try:
        yield around
    finally:
        around.strict = strict

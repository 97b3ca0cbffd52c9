"""One family of errors for everything that the types forbid."""

from __future__ import annotations

__all__ = ["SpmdTypeError"]


class SpmdTypeError(ValueError):
    """A pair of types that no operator takes, or a tensor whose type is not what an operator needs."""

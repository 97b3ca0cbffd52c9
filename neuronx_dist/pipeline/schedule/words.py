"""Numbers of things, in messages."""

from __future__ import annotations

__all__ = ["counted"]


def counted(amount: int | str, noun: str) -> str:
    """`1 microbatch`, `2 microbatches`."""
    plural = "" if str(amount) == "1" else "es" if noun.endswith("ch") else "s"
    return f"{amount} {noun}{plural}"

"""Names that an emitted file has for itself, and what an argument of such a name is called there."""

from __future__ import annotations

__all__ = ["FILE_NAMES", "argument_name"]

FILE_NAMES = frozenset(
    ("torch", "F", "spmd", "composites", "checkpoint", "ParallelModule", "Stored", "I", "P", "R", "S", "self")
)


def argument_name(name: str) -> str:
    """What an emitted forward calls an argument: another name than those that its file has."""
    return f"{name}_" if name in FILE_NAMES else name

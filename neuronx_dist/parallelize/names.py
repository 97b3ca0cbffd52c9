"""Names that an emitted file has for itself, and what an argument of such a name is called there."""

from __future__ import annotations

__all__ = ["fresh", "FILE_NAMES", "argument_name"]

FILE_NAMES = frozenset(
    ("torch", "F", "spmd", "composites", "checkpoint", "ParallelModule", "Stored", "I", "P", "R", "S", "self")
)


def argument_name(name: str) -> str:
    """What an emitted forward calls an argument: another name than those that its file has."""
    return f"{name}_" if name in FILE_NAMES else name


def fresh(name: str, taken: set[str]) -> str:
    """A name that is not taken; from now on it is."""
    new, number = name, 2
    while new in taken:
        new, number = f"{name}_{number}", number + 1
    taken.add(new)
    return new

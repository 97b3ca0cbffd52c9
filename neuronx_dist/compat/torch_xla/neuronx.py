"""torch_neuronx: the name of the platform."""

from __future__ import annotations

__all__ = ["__version__", "get_platform_target"]

__version__ = "2.9.0"


def get_platform_target() -> str:
    """Returns "trn2", on which the ranks that share a key/value head are adjacent, as in this package."""
    return "trn2"

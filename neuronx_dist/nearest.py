"""Similar names for error messages about an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Returns the most similar of these names, for a message; the first four if none is similar."""
    known = list(dict.fromkeys(candidates))
    by_lower = {candidate.lower(): candidate for candidate in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=4, cutoff=0.3)
    return ", ".join([by_lower[name] for name in near] or known[:4])

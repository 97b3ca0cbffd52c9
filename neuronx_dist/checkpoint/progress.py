"""How far a conversion is, on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["progress_bar"]


def progress_bar(target: str) -> Callable[[int, int], None]:
    """Draws a bar on a terminal; elsewhere it says nothing."""
    drawn = 0.0

    def report(done: int, total: int) -> None:
        nonlocal drawn
        if not sys.stderr.isatty() or (done < total and time.monotonic() - drawn < 0.1):
            return
        drawn = time.monotonic()
        filled = 30 * done // total
        bar = "#" * filled + "-" * (30 - filled)
        print(f"\r{target} [{bar}] {done}/{total} tensors", end="\n" if done == total else "", file=sys.stderr)

    return report

"""Names of files in a folder, as files that come from elsewhere list them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

__all__ = ["leading_out"]


def leading_out(names: Iterable[str]) -> list[str]:
    """Returns the names that lead out of the folder: reading such a file would read, or overwrite, any other."""
    return [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]

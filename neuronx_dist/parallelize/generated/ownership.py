"""Ownership of folders whose code runs: nobody but the user can write it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["writable_by_others"]


def writable_by_others(base: Path, folder: Path) -> str:
    """Returns what another user could write of the files in a folder, in words; "" if nothing.

    Args:
        base: a folder, with its links resolved: what is above it is not looked at.
        folder: in `base`, with its links resolved; it may be missing.
    """
    if not folder.is_relative_to(base):
        return f"{folder} is reached through a symbolic link out of {base}"
    between = [parent for parent in folder.parents if parent.is_relative_to(base)]
    for path in [*reversed(between), folder, *sorted(folder.rglob("*"))]:
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if found.st_uid != os.geteuid():
            return f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}"
        mode = stat.S_IMODE(found.st_mode)
        if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and found.st_gid != os.getegid()):
            return f"{path} has mode {mode:03o}, so that others can write it"
    return ""

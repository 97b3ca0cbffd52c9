"""Checksums of files whose format has none: `SHA256SUMS` in their folder, which `sha256sum -c` reads too."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from ..folder_names import leading_out

__all__ = ["SUMS", "check_sums", "write_sums"]

SUMS = "SHA256SUMS"


def write_sums(folder: Path, files: Iterable[Path]) -> None:
    """Writes the checksums of files in a folder, or below it."""
    lines = [f"{_sum(file)}  {file.relative_to(folder).as_posix()}\n" for file in sorted(files)]
    (folder / SUMS).write_text("".join(lines))


def check_sums(folder: Path, share: int = 0, shares: int = 1) -> None:
    """Compares the files of a folder with its checksums, if it has any.

    Args:
        share, shares: the part of the files to compare, and the number of parts.

    Raises:
        ValueError: a file is missing, or differs; or the checksums cannot be read. The message names the file.
    """
    sums = folder / SUMS
    if not sums.is_file():
        return
    listed: dict[str, str] = {}
    for line in sums.read_text(errors="replace").splitlines():
        match = re.fullmatch(r"([0-9a-f]{64}) [ *]([^\0]+)", line)
        if match is None:
            raise ValueError(f"{sums} is damaged: it has the line {line[:100]!r}; `sha256sum` writes it anew")
        listed[match[2]] = match[1]
    if not listed:
        raise ValueError(f"{sums} is empty: `sha256sum` writes it anew, without it the files are not compared")
    if outside := leading_out(listed):
        raise ValueError(f"{sums} names {outside[0]}, outside of its folder: do not trust this folder")
    for name in sorted(listed)[share::shares]:
        if not (folder / name).is_file():
            raise ValueError(f"{folder / name} is missing: {SUMS} lists it")
        if _sum(folder / name) != listed[name]:
            raise ValueError(
                f"{folder / name} differs from what was written: its checksum is not that of {SUMS}. Copy it again, or "
                f"remove {SUMS} if the file was changed on purpose"
            )


def _sum(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

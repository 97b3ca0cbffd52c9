"""Checkpoints in a folder, as NeuronX Distributed lays them out: a folder for each tag, complete when `done` is there.

    dir/step_100/checkpoint    written first: this folder is a checkpoint, complete or not
    dir/step_100/...           its files
    dir/step_100/done          written last, removed first: lists the files and their sizes
    dir/step_100.previous/     the checkpoint that `step_100` replaces, until the new one is complete

A process that is killed in between leaves a folder without `done`, which counts as no checkpoint, and all other
checkpoints unchanged. Only a folder whose `checkpoint` says that this package wrote it is ever removed, and none
through a symbolic link.
"""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from ..folder_names import leading_out
from .errors import CheckpointCorrupted, CheckpointError
from .storage import Storage

__all__ = ["DONE", "MARKER", "CheckpointFolder", "Entry", "Tag", "check_tag"]

MARKER, DONE = "checkpoint", "done"
PREVIOUS = ".previous"
_FORMAT = "neuronx_dist checkpoint, format 1\n"


class Entry(NamedTuple):
    """A file of a checkpoint: size in bytes, and CRC-32, None for a file that ends with checksums."""

    size: int
    crc32: int | None = None


class Tag(NamedTuple):
    """A complete checkpoint.

    Attributes:
        name: of the folder.
        saved: time in seconds since 1970, later than that of all checkpoints before.
        files: entries by path; None if `done` does not list them (NeuronX Distributed's).
        damage: the fault of `done`, in words; "" without a fault.
    """

    name: str
    saved: float
    files: dict[str, Entry] | None
    damage: str = ""


def check_tag(tag: object) -> str:
    """Returns the name of a tag's folder.

    Raises:
        ValueError: the name is no name of a folder, or would lie outside of the checkpoint folder.
    """
    name = str(tag) if isinstance(tag, (str, int)) else ""
    bad = re.search(r'[/\\\0-\x1f:*?"<>|]', name)
    if not name or bad or name.startswith(".") or name.endswith(PREVIOUS) or len(name.encode()) > 200:
        raise ValueError(
            f"tag {tag!r} cannot name a checkpoint: it must be the name of one folder, of at most 200 bytes, "
            'without / \\ : * ? " < > | and control characters, not starting with "." or ending in '
            f'"{PREVIOUS}"'
        )
    return name


class CheckpointFolder:
    """The checkpoints in a storage. One process changes them at a time: rank 0."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def complete(self) -> list[Tag]:
        """The complete checkpoints, newest first."""
        tags = [self.tag(name) for name in self.storage.list() if self.is_complete(name)]
        return sorted(tags, key=lambda tag: (-tag.saved, tag.name))

    def is_complete(self, name: str) -> bool:
        return self.storage.exists(f"{name}/{DONE}")

    def find(self, name: str) -> Tag:
        """The complete checkpoint of this tag; the earlier one while it is being replaced.

        Raises:
            CheckpointError: there is no complete checkpoint of this tag.
        """
        for candidate in (name, name + PREVIOUS):
            if self.is_complete(candidate):
                return self.tag(candidate)
        where, others = self.storage.describe(), ", ".join(tag.name for tag in self.complete()[:5])
        there = f"complete are: {others}" if others else "there is no complete checkpoint"
        if self.storage.exists(f"{name}/{MARKER}"):
            raise CheckpointError(f"checkpoint {name!r} in {where} is incomplete: its save was interrupted; {there}")
        raise CheckpointError(f"there is no checkpoint {name!r} in {where}; {there}")

    def begin(self, name: str) -> None:
        """Creates the folder of a new checkpoint. A complete one of this name stays until the new one is complete.

        Raises:
            CheckpointError: the name belongs to anything that this package did not write. Nothing is changed.
        """
        for folder in (name, name + PREVIOUS):
            foreign = self._foreign(folder)
            if foreign:
                raise CheckpointError(
                    f"{self.storage.describe(folder)} {foreign}: saving here would delete it. Save under another tag, "
                    "or move it away"
                )
        if self.is_complete(name):
            self.remove(name + PREVIOUS)
            self.storage.rename(name, name + PREVIOUS, first=MARKER, last=DONE)
        self.remove(name)
        self.storage.make_folder(name)
        self.storage.write(f"{name}/{MARKER}", [_FORMAT.encode()])
        self.storage.sync(name)

    def has_begun(self, name: str) -> bool:
        """Returns whether this process sees the folder that `begin` created."""
        return self.storage.exists(f"{name}/{MARKER}")

    def commit(self, name: str, files: Mapping[str, Entry]) -> None:
        """Completes a checkpoint; all its files must be written and synced."""
        self.storage.sync(name)
        saved = max([time.time(), *(tag.saved + 1e-3 for tag in self.complete())])
        self.storage.write(f"{name}/{DONE}", [_encode(saved, files)])
        self.storage.sync(name)

    def abandon(self, name: str) -> None:
        """Removes a checkpoint that was begun, if possible; the complete one that it replaced gets its name back.

        Complete checkpoints stay: the old one, if `begin` failed before renaming it; the new one, if only steps after
        `done` failed.
        """
        with suppress(Exception):  # storages raise errors of any class, and other ranks wait for this one
            if self.is_complete(name):
                return
            self.remove(name)
            if self.is_complete(name + PREVIOUS):
                self.storage.rename(name + PREVIOUS, name, first=MARKER, last=DONE)

    def clean(self, name: str, keep: int | None = None) -> None:
        """Removes checkpoints that complete checkpoint `name` supersedes: the one that it replaced, and older ones.

        Args:
            keep: number of complete checkpoints that stay; None: all, and remains of killed jobs stay too.
        """
        self.remove(name + PREVIOUS)
        if keep is not None:
            self.rotate(keep)

    def rotate(self, keep: int) -> None:
        """Removes complete checkpoints older than the `keep` newest, and incomplete ones older than the newest."""
        tags = [tag for tag in self.complete() if self.storage.kind(tag.name) != "link"]
        newest = [tag for tag in tags if not tag.damage][:keep]
        complete = {tag.name for tag in tags}
        for tag in tags:
            if newest and tag.saved < newest[-1].saved:
                self.remove(tag.name)
        for name in self.storage.list():
            is_incomplete = name not in complete and self.has_begun(name)
            if newest and is_incomplete and self.storage.modified(f"{name}/{MARKER}") < newest[0].saved:
                self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a checkpoint: `done` first, the marker last, so that remains are recognised as incomplete.

        A folder that this package did not write stays as it is.
        """
        if self._foreign(name):
            return
        if self.storage.exists(f"{name}/{DONE}"):
            self.storage.remove(f"{name}/{DONE}")
            self.storage.sync(name)
        for entry in self.storage.list(name):
            if entry != MARKER:
                self.storage.remove_tree(f"{name}/{entry}")
        self.storage.remove_tree(name)

    def _foreign(self, name: str) -> str:
        """Returns what stands under a name, in words, if this package did not write it; "" else."""
        kind = self.storage.kind(name)
        if kind == "link":
            return "is a symbolic link"
        if kind == "file":
            return "is a file"
        if not kind or self._marker(name) == _FORMAT:
            return ""
        entries = [entry for entry in self.storage.list(name) if entry != f"{MARKER}.partial"]
        if not entries:  # a process was killed before it wrote the marker
            return ""
        more = ", ..." if len(entries) > 3 else ""
        return f"is no checkpoint of neuronx_dist, and contains {', '.join(entries[:3])}{more}"

    def damage(self, tag: Tag, share: int = 0, shares: int = 1, contents: dict[str, bytes] | None = None) -> list[str]:
        """Files of a checkpoint that are missing, or whose size or checksum differs from `done`, in words.

        Files that end with checksums are compared with these when they are read (`reading`).

        Args:
            share, shares: the part of the files to examine, and the number of parts.
            contents: receives the content of files that were read whole, by path.
        """
        files = tag.files
        if tag.damage or files is None:
            return [tag.damage] if tag.damage and share == 0 else []
        wrong = [f"{MARKER} is not what was written"] if share == 0 and self._marker(tag.name) != _FORMAT else []
        for path in sorted(files)[share::shares]:
            entry = files[path]
            try:
                size = self.storage.size(f"{tag.name}/{path}")
                if size != entry.size:
                    wrong.append(f"{path} has {size} bytes instead of {entry.size}")
                elif entry.crc32 is not None:
                    content = self.read(tag, path)
                    if contents is not None:
                        contents[path] = content
            except CheckpointCorrupted as error:
                wrong.append(str(error))
            except FileNotFoundError:
                wrong.append(f"{path} is missing")
        return wrong

    def read(self, tag: Tag, path: str) -> bytes:
        """Reads a whole (small) file of a checkpoint.

        Raises:
            CheckpointCorrupted: the file differs from what was written.
        """
        try:
            content = self.storage.read(f"{tag.name}/{path}")
        except FileNotFoundError:
            raise CheckpointCorrupted(f"{path} is missing") from None
        entry = (tag.files or {}).get(path)
        if entry is not None and entry.crc32 is not None and zlib.crc32(content) != entry.crc32:
            raise CheckpointCorrupted(f"{path} is damaged: its checksum is wrong")
        return content

    def _marker(self, name: str) -> str:
        try:
            return self.storage.read(f"{name}/{MARKER}").decode(errors="replace")
        except FileNotFoundError:
            return ""

    def tag(self, name: str) -> Tag:
        """Reads `done` of a complete checkpoint."""
        content = self.storage.read(f"{name}/{DONE}")
        try:
            return Tag(name, *_decode(content))
        except CheckpointCorrupted as error:
            ours = self._marker(name) == _FORMAT or content.lstrip().startswith(b"{")
            modified = self.storage.modified(f"{name}/{DONE}")
            return Tag(name, modified, None, f"{DONE} {error}" if ours else "")


def _encode(saved: float, files: Mapping[str, Entry]) -> bytes:
    text = json.dumps({"saved": saved, "files": dict(sorted(files.items()))}, indent=1)
    return f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode()


def _decode(content: bytes) -> tuple[float, dict[str, Entry]]:
    text, _, crc32 = content.decode(errors="replace").rstrip("\n").rpartition("\n")
    if content[-1:] != b"\n" or crc32 != f"{zlib.crc32(text.encode()):08x}":
        raise CheckpointCorrupted("is not what was written")
    try:
        values = json.loads(text)
        saved = float(values["saved"])
        files = {path: Entry(*entry) for path, entry in values["files"].items()}
        outside = leading_out(files)
        if not all(
            isinstance(entry.size, int) and isinstance(entry.crc32, (int, type(None))) for entry in files.values()
        ):
            raise TypeError("sizes and checksums are integers")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupted("lists files in another form than save_checkpoint does") from error
    if outside:
        raise CheckpointCorrupted(f"refers to files outside of its folder: {outside[:3]}")
    return saved, files

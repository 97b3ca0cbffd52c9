"""Files of a checkpoint, on a local disk or wherever fsspec reaches: `memory://`, `s3://bucket/folder`, ...

A written file exists completely or not at all. On a local disk `write` syncs the content of files, `sync` the names.
"""

from __future__ import annotations

import mmap
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import fsspec

__all__ = ["LocalStorage", "RemoteStorage", "Storage", "open_storage"]


class Storage(ABC):
    """Interface of a folder. Paths are relative to the folder, their parts separated by "/"."""

    url: str

    def describe(self, path: str = "") -> str:
        """The full name of a path, for error messages."""
        return f"{self.url.rstrip('/')}/{path}".rstrip("/") if path else self.url

    @abstractmethod
    def write(self, path: str, chunks: Iterable[Any]) -> None:
        """Writes a file of these buffers, in order; creates missing folders."""

    @abstractmethod
    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """The bytes of a file from `start` to `stop`.

        Raises:
            FileNotFoundError: there is no such file.
        """

    @abstractmethod
    def map(self, path: str, ranges: Sequence[tuple[int, int]] | None = None) -> memoryview:
        """A file as a writable buffer of its size; writes to the buffer stay in this process.

        Args:
            ranges: `(start, stop)` of the bytes that are used; None: all. On a local disk pages are read on first use.
                Elsewhere only these bytes are read, and others are 0.
        """

    def local_path(self, path: str) -> Path | None:
        """The path in the operating system, if the file is local."""
        return None

    @abstractmethod
    def size(self, path: str) -> int: ...

    @abstractmethod
    def modified(self, path: str) -> float:
        """Time at which a file was written, in seconds since 1970."""

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def list(self, path: str = "") -> list[str]:
        """Names of files and folders in a folder; empty if the folder is missing."""

    @abstractmethod
    def make_folder(self, path: str = "") -> None: ...

    @abstractmethod
    def remove(self, path: str) -> None:
        """Removes a file, if it exists."""

    @abstractmethod
    def remove_tree(self, path: str) -> None:
        """Removes a folder and its content, or a file, if it exists."""

    @abstractmethod
    def rename(self, source: str, target: str, first: str, last: str) -> None:
        """Renames a folder.

        If that is not atomic, file `first` is written first and removed last, file `last` the other way round.
        """

    @abstractmethod
    def kind(self, path: str) -> Literal["", "link", "file", "folder"]:
        """Returns "link" for a symbolic link, also to a folder; "" if the path does not exist."""

    def sync(self, path: str = "") -> None:  # noqa: B027 - nothing to do where a written file has its name at once
        """Waits until the names in a folder are synced."""


class LocalStorage(Storage):
    """A folder of the operating system."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.url = os.fspath(folder)
        self._root = Path(self.url)

    def write(self, path: str, chunks: Iterable[Any]) -> None:
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(target.name + ".partial")
        try:
            with open(partial, "wb", buffering=0) as file:
                for chunk in chunks:
                    view = memoryview(chunk).cast("B")
                    while view:
                        view = view[file.write(view) :]
                os.fsync(file.fileno())
            os.replace(partial, target)
        except BaseException:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        with open(self._root / path, "rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def map(self, path: str, ranges: Sequence[tuple[int, int]] | None = None) -> memoryview:
        with open(self._root / path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return memoryview(b"")
            # Writable, so that torch makes tensors of it without a warning; writes stay in this process.
            flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
            return memoryview(mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))

    def local_path(self, path: str) -> Path | None:
        return self._root / path

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def modified(self, path: str) -> float:
        return (self._root / path).stat().st_mtime

    def exists(self, path: str) -> bool:
        return (self._root / path).exists()

    def list(self, path: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._root / path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_folder(self, path: str = "") -> None:
        folder = self._root / path
        missing = [ancestor for ancestor in (folder, *folder.parents) if not ancestor.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for ancestor in missing:
            _sync_folder(ancestor.parent)

    def remove(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def remove_tree(self, path: str) -> None:
        target = self._root / path
        with suppress(FileNotFoundError):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            else:
                target.unlink()

    def kind(self, path: str) -> Literal["", "link", "file", "folder"]:
        target = self._root / path
        if target.is_symlink():
            return "link"
        return "folder" if target.is_dir() else "file" if target.exists() else ""

    def rename(self, source: str, target: str, first: str, last: str) -> None:
        os.rename(self._root / source, self._root / target)
        self.sync()

    def sync(self, path: str = "") -> None:
        _sync_folder(self._root / path)


class RemoteStorage(Storage):
    """A folder of any file system that fsspec knows.

    Args:
        filesystem: an `fsspec.AbstractFileSystem`.
        root: a folder in it, without protocol.
        url: the name that users gave.
    """

    _BLOCK = 64 << 20  # bytes of one part of an upload or a download
    _AT_ONCE = 8  # parts that are read at the same time

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = root.rstrip("/")

    def _path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def write(self, path: str, chunks: Iterable[Any]) -> None:
        target = self._path(path)
        self._filesystem.makedirs(target.rpartition("/")[0], exist_ok=True)
        try:
            with self._filesystem.open(target, "wb", block_size=self._BLOCK) as file:
                for chunk in chunks:
                    file.write(memoryview(chunk).cast("B"))
        except BaseException:  # the part written so far may have been stored under the name
            with suppress(Exception):
                self._filesystem.rm_file(target)
            raise

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(
            self._filesystem.cat_file(self._path(path), start=start or None, end=stop)
        )  # an empty file has no range

    def map(self, path: str, ranges: Sequence[tuple[int, int]] | None = None) -> memoryview:
        size = self.size(path)
        if not size:
            return memoryview(b"")
        buffer = memoryview(mmap.mmap(-1, size))
        parts = [
            (first, min(first + self._BLOCK, stop))
            for start, stop in ([(0, size)] if ranges is None else ranges)
            for first in range(start, stop, self._BLOCK)
        ]
        for number in range(0, len(parts), self._AT_ONCE):
            starts, stops = zip(*parts[number : number + self._AT_ONCE])
            contents = self._filesystem.cat_ranges([self._path(path)] * len(starts), list(starts), list(stops))
            for start, stop, content in zip(starts, stops, contents):
                if isinstance(content, Exception):
                    raise content
                buffer[start:stop] = content
        return buffer

    def size(self, path: str) -> int:
        return int(self._filesystem.size(self._path(path)))

    def modified(self, path: str) -> float:
        return float(self._filesystem.modified(self._path(path)).timestamp())

    def exists(self, path: str) -> bool:
        self._filesystem.invalidate_cache()
        return bool(self._filesystem.exists(self._path(path)))

    def list(self, path: str = "") -> list[str]:
        self._filesystem.invalidate_cache()
        here = self._path(path)
        try:
            entries = self._filesystem.ls(here, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (entry.rstrip("/").rpartition("/")[2] for entry in entries if entry.strip("/") != here.strip("/"))
        return sorted(name for name in names if name)

    def kind(self, path: str) -> Literal["", "link", "file", "folder"]:
        self._filesystem.invalidate_cache()
        where = self._path(path)
        return "folder" if self._filesystem.isdir(where) else "file" if self._filesystem.exists(where) else ""

    def make_folder(self, path: str = "") -> None:
        self._filesystem.makedirs(self._path(path), exist_ok=True)

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(path))

    def remove_tree(self, path: str) -> None:
        self._filesystem.invalidate_cache()
        with suppress(FileNotFoundError):
            self._filesystem.rm(self._path(path), recursive=True)

    def rename(self, source: str, target: str, first: str, last: str) -> None:
        here, there = self._path(source), self._path(target)
        self._filesystem.invalidate_cache()
        files = [name.strip("/")[len(here.strip("/")) + 1 :] for name in self._filesystem.find(here)]
        files.sort(key=lambda name: (name == last, name != first, name))
        for name in files:
            self._filesystem.makedirs(f"{there}/{name}".rpartition("/")[0], exist_ok=True)
            self._filesystem.cp_file(f"{here}/{name}", f"{there}/{name}")
        for name in reversed(files):
            self.remove(f"{source}/{name}")
        self.remove_tree(source)


def open_storage(url: str | os.PathLike[str]) -> Storage:
    """Returns the storage of a folder: a path, or a URL such as `s3://bucket/run`, with fsspec's configuration of it.

    Raises:
        ImportError: the protocol needs a package that is not installed (s3fs for `s3://`).
        ValueError: fsspec knows no such protocol.
    """
    name = os.fspath(url)
    if name.startswith("file://"):
        name = name[len("file://") :]
    if "://" not in name:
        return LocalStorage(name)
    filesystem, root = fsspec.core.url_to_fs(name)
    return RemoteStorage(filesystem, root, name)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

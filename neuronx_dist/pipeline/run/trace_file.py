"""A file of trace events in the format of Chrome and Perfetto, to which all ranks of a host append.

The file is a JSON array at any moment, also when a job is killed: after the events come blanks, after the blanks the
closing bracket, and events are written into the blanks. A process can be killed in the middle of a write, but not
within a page of the file, so no write crosses pages. When the blanks are used up, a copy with more blanks replaces the
file, which keeps its name.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ... import comm

__all__ = ["TraceFile", "checked_path", "open_together"]

_PAGE = 4096  # bytes
_FIRST = 16 * _PAGE  # size of a file that is new
_LIMIT = 256 << 20  # bytes; Perfetto opens such a file in a browser, and takes its time
_CLOSING = b"\n]"


class TraceFile:
    """An existing file of a trace.

    Args:
        origin: the `time.perf_counter_ns()` that is time 0 of the trace. Processes of one host have one such clock.
    """

    def __init__(self, path: Path, origin: int) -> None:
        self.path = path
        self.origin = origin
        self.full = False  # True: nothing more is appended
        self._descriptor = os.open(path, os.O_RDWR)
        self._page = 0  # index of a page that has events

    @staticmethod
    def create(path: Path, event: Mapping[str, Any]) -> None:
        """Creates a trace with one event; replaces an existing file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(_replace(path, b"[\n" + _encoded(event), _FIRST))

    def append(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Adds events of up to a page each. A file of 256 MiB, or one that was deleted, gets no more events."""
        lines = [line for event in events if len(line := b",\n" + _encoded(event)) <= _PAGE]
        if not lines or self.full or not self._lock():
            return
        try:
            size, position, pending = os.fstat(self._descriptor).st_size, self._end(), b""
            for line in lines:
                end = position + len(pending)
                room = -end % _PAGE
                if len(line) > room:  # continue on the next page
                    os.pwrite(self._descriptor, pending, position)
                    position, pending = end + room, b""
                    if position + _PAGE >= size:  # the last page has the bracket, and no events
                        size *= 2
                        self._grow(size, end)
                        if self.full:
                            return
                pending += line
            os.pwrite(self._descriptor, pending, position)
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)

    def _lock(self) -> bool:
        """Locks the file against other ranks, which may have replaced it; returns False if the file is gone."""
        while True:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            try:
                if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                    return True
                descriptor = os.open(self.path, os.O_RDWR)
            except FileNotFoundError:
                self.full = True
                return False
            os.close(self._descriptor)
            self._descriptor, self._page = descriptor, 0

    def _end(self) -> int:
        """Offset of the end of the events. Pages are filled in order, and begin with an event."""
        while os.pread(self._descriptor, 1, _PAGE * (self._page + 1)) == b",":
            self._page += 1
        page = os.pread(self._descriptor, _PAGE, _PAGE * self._page)
        return _PAGE * self._page + len(page.rstrip(b" "))

    def _grow(self, size: int, used: int) -> None:
        self.full = size > _LIMIT
        if not self.full:
            descriptor = _replace(self.path, os.pread(self._descriptor, used, 0), size)
            os.close(self._descriptor)
            self._descriptor = descriptor


def _replace(path: Path, content: bytes, size: int) -> int:
    """Replaces a file by content, blanks and closing bracket; opens and locks the new file."""
    copy = path.with_name(path.name + ".new")
    copy.write_bytes(content.ljust(size - len(_CLOSING)) + _CLOSING)
    descriptor = os.open(copy, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.replace(copy, path)
    return descriptor


def _encoded(event: Mapping[str, Any]) -> bytes:
    return json.dumps(event, separators=(",", ":")).encode()


def checked_path(path: str | os.PathLike[str] | None) -> str | None:
    """Returns the name of a trace file; None: no trace.

    Raises:
        ValueError: another value, or a folder.
    """
    if path is None:
        return None
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise ValueError(f"trace_file_path={path!r}: expected the name of a file, such as 'trace.json'")
    if os.path.isdir(path):
        raise ValueError(f"trace_file_path={os.fspath(path)!r} is a folder: name a file in it, such as 'trace.json'")
    return os.fspath(path)


def open_together(path: str) -> TraceFile:
    """Opens a new trace; all ranks of the job call it at once, and agree on time 0.

    Between hosts time 0 is exact up to the latency of a message.

    Returns:
        The file at `path`, for a job on one host; else a file for each host, `trace-HOST.json`.
    """
    hosts = comm.gather_objects(socket.gethostname())
    now = time.perf_counter_ns()  # the ranks have just met
    file = Path(path)
    if len(set(hosts)) > 1:
        file = file.with_name(f"{file.stem}-{socket.gethostname()}{file.suffix}")
    first = hosts.index(socket.gethostname())  # rank that creates it
    if comm.current().rank == first:
        started = {"started": datetime.now().isoformat()}
        TraceFile.create(file, {"name": "trace", "ph": "M", "pid": first, "args": started})
    origins = comm.gather_objects(now)  # afterwards the file exists
    return TraceFile(file, origins[first])

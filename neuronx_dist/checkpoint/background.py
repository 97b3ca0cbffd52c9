"""A save from its first byte to `done`, while the run goes on.

Every rank writes its files, in a separate thread if the save is asynchronous. Then rank 0 completes the checkpoint.
Notes that ranks leave in the folder tell rank 0 that all files are written; if the run calls a checkpoint function
earlier, the exchange in that call does.

No thread communicates: a collective in the background would meet those of training in another order on every rank. A
separate process group would need a second network between all ranks for one message per rank, and neither ranks as
threads nor XLA devices have one. The folder exists in any case.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from .. import comm
from .agreement import by_rank, text_of
from .dcp.staging import Staging
from .errors import CheckpointError
from .storage import Storage
from .tags import CheckpointFolder, Entry

__all__ = ["CheckpointIOState", "Save", "state_of_rank"]

_NOTES = ".written"  # the folder, inside of a tag's, of the ranks' notes
_PIECE = 16 << 20  # bytes between two checks of whether the save is superseded
_TIMEOUT_ENV = "NEURONX_DIST_CHECKPOINT_TIMEOUT"
_TIMEOUT = 1800.0
_AT_EXIT = 60.0  # seconds after the end of the program: if the folder does not change any more, missing ranks are gone


class _Superseded(Exception):
    """Ends a save that is superseded by a newer one."""


class _Noting:
    """A storage for one rank's files that records written files, and stops when the save is superseded."""

    def __init__(self, storage: Storage, superseded: threading.Event) -> None:
        self._storage = storage
        self._superseded = superseded
        self.sizes: dict[str, int] = {}

    def write(self, path: str, chunks: Iterable[Any]) -> None:
        size = 0

        def pieces() -> Iterator[memoryview]:
            nonlocal size
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                for start in range(0, len(view), _PIECE):
                    if self._superseded.is_set():
                        raise _Superseded
                    yield view[start : start + _PIECE]
                size += len(view)

        self._storage.write(path, pieces())
        self.sizes[path] = size


class Save:
    """One checkpoint being written, as one rank sees it.

    Args:
        folder: of all checkpoints.
        tag: the name of the checkpoint.
        write: `write(storage, path)` writes this rank's files below `path`.
        entries: files that `write` writes and that have a checksum in `done`; other files end with checksums.
        keep: number of complete checkpoints to keep; None: all.
        rank, ranks: this rank, and the number of ranks.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        tag: str,
        write: Callable[[Any, str], None],
        entries: dict[str, Entry],
        keep: int | None,
        rank: int,
        ranks: int,
    ) -> None:
        self.folder = folder
        self.tag = tag
        self.superseded = threading.Event()
        self.error: BaseException | None = None
        self._write = write
        self._entries = entries
        self._keep = keep
        self._rank = rank
        self._ranks = ranks
        self._files: dict[str, Entry] = {}
        self._thread: threading.Thread | None = None
        self._own_files_written = threading.Event()
        self._exchanged = threading.Event()  # `_reports` came by a collective
        self._reports: dict[int, dict[str, Entry]] = {}  # on rank 0: what each rank has written

    def start(self) -> None:
        """Writes in a thread, which Python waits for when it exits."""
        self._thread = threading.Thread(target=self._in_background, name=f"checkpoint-{self.tag}")
        self._thread.start()

    def write_own_files(self) -> None:
        """Writes and syncs this rank's files; keeps an error for `settle`."""
        try:
            storage = _Noting(self.folder.storage, self.superseded)
            self._write(storage, self.tag)
            prefix = f"{self.tag}/"
            sizes = {path.removeprefix(prefix): size for path, size in storage.sizes.items()}
            self._files = {path: self._entries.get(path, Entry(size)) for path, size in sizes.items()}
            for below in {path.rpartition("/")[0] for path in sizes}:
                self.folder.storage.sync(prefix + below if below else self.tag)
        except Exception as error:
            self.error = error
        finally:
            self._own_files_written.set()

    def settle(self) -> None:
        """Waits until the checkpoint is complete. All ranks call it.

        Raises:
            CheckpointError: on all ranks, if a rank failed; the written files are removed.
        """
        if self._thread is not None and self._rank:
            self._thread.join()  # so that its note is written too: rank 0 is about to remove all notes
        self._own_files_written.wait()
        superseded = isinstance(self.error, _Superseded)
        error = None if superseded else self.error
        reports = comm.gather_objects((text_of(error), superseded, self._files))
        failed = {rank: message for rank, (message, _, _) in enumerate(reports) if message}
        wanted = not failed and not any(superseded for _, superseded, _ in reports)
        if wanted:
            self._reports = {rank: files for rank, (_, _, files) in enumerate(reports)}
        self._exchanged.set()
        if self._thread is not None:
            self._thread.join()
        elif self._rank == 0 and wanted:
            self._complete()
        if self._rank == 0 and (not wanted or self.error is not None):
            self.folder.abandon(self.tag)
        if wanted:  # only rank 0 has done something since
            error = self.error
        (message, *_) = comm.gather_objects(text_of(error))  # all go on when rank 0 has
        failed = failed or ({0: message} if message else {})
        if failed:
            where = self.folder.storage.describe(self.tag)
            raise CheckpointError(f"checkpoint {where} could not be written: {by_rank(failed)}") from error

    def _in_background(self) -> None:
        self.write_own_files()
        notes = f"{self.tag}/{_NOTES}"
        if isinstance(self.error, _Superseded):
            return  # all ranks are about to agree on the end; a note would be read as a failure
        if self._rank:
            with suppress(Exception):  # then rank 0 learns of it from the exchange
                note = json.dumps({"failure": text_of(self.error), "files": self._files})
                self.folder.storage.write(f"{notes}/{self._rank}", [note.encode()])
        elif self.error is None:
            self._complete(self._wait_for_notes)
        if self.error is not None and not threading.main_thread().is_alive():  # no later call will report it
            print(f"[rank {self._rank}] checkpoint {self.tag} failed: {self.error}", file=sys.stderr, flush=True)

    def _complete(self, wait: Callable[[], bool] = lambda: True) -> None:
        """Completes the checkpoint when `wait` says that all ranks have written (rank 0)."""
        try:
            if wait():
                files = {path: entry for _, report in sorted(self._reports.items()) for path, entry in report.items()}
                self.folder.storage.remove_tree(f"{self.tag}/{_NOTES}")
                self.folder.commit(self.tag, files)
                self._clean()
        except Exception as error:
            self.error = error

    def _clean(self) -> None:
        """Removes older checkpoints. A failure here does not affect the checkpoint that is complete now."""
        try:
            self.folder.clean(self.tag, self._keep)
        except Exception as error:
            where = self.folder.storage.describe(self.tag)
            warnings.warn(f"checkpoint {where} is complete; older ones were not removed: {error}", stacklevel=2)

    def _wait_for_notes(self) -> bool:
        """Waits for the notes of all ranks; returns whether all have written."""
        notes, storage = f"{self.tag}/{_NOTES}", self.folder.storage
        reports = {0: self._files}
        pause, last, written = 0.005, time.monotonic(), 0
        while len(reports) < self._ranks:
            if self._exchanged.wait(pause):
                return bool(self._reports)
            pause = min(1.0, 1.5 * pause)
            for name in storage.list(notes):
                if name.isdecimal() and int(name) not in reports:
                    note = json.loads(storage.read(f"{notes}/{name}"))
                    if note["failure"]:
                        raise CheckpointError(f"rank {name}: {note['failure']}")
                    reports[int(name)] = {path: Entry(*entry) for path, entry in note["files"].items()}
                    last = time.monotonic()
            if (size := self._size_so_far()) != written:
                written, last = size, time.monotonic()
            default = _TIMEOUT if threading.main_thread().is_alive() else _AT_EXIT
            seconds = float(os.environ.get(_TIMEOUT_ENV, default))
            if time.monotonic() - last > seconds:
                missing = [rank for rank in range(self._ranks) if rank not in reports]
                raise CheckpointError(
                    f"ranks {missing[:8]} did not report within {seconds:g} s that their files are written, and "
                    f"have stopped writing: they were killed, or ended early (set {_TIMEOUT_ENV} to wait longer)"
                )
        self._reports = reports
        return True

    def _size_so_far(self) -> int:
        """Bytes in the folder, files that are being written included where the storage shows them."""
        size = 0
        for name in self.folder.storage.list(self.tag):
            with suppress(OSError):  # renamed meanwhile
                size += self.folder.storage.size(f"{self.tag}/{name}")
        return size


class CheckpointIOState:
    """State of a rank between saves: the save that is under way, and the memory that tensors are copied to.

    Attributes:
        pending: the asynchronous save that has not been waited for.
        staged: the memory of the last asynchronous save, reused by the next.
        staging: the copies in that memory.
    """

    def __init__(self) -> None:
        self.pending: Save | None = None
        self.staged: torch.Tensor | None = None
        self.staging: Staging | None = None

    def settle(self, supersede: bool = False) -> None:
        """Waits for the save that is under way, if there is one, or ends it. All ranks call it.

        Raises:
            CheckpointError: the save failed on a rank.
        """
        save, self.pending = self.pending, None
        if save is not None:
            if supersede:
                save.superseded.set()
            try:
                save.settle()
            finally:
                if self.staging is not None:
                    self.staging.close()
                    self.staging = None


def state_of_rank() -> CheckpointIOState:
    """The `CheckpointIOState` of the current rank."""
    state: CheckpointIOState = comm.current().extras.setdefault("checkpoint", CheckpointIOState())
    return state

"""Files on a local disk, in memory, and on an S3 server on loopback: the same calls, the same results."""

from __future__ import annotations

import io
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist.checkpoint import storage as storage_module
from neuronx_dist.checkpoint.storage import LocalStorage, RemoteStorage, Storage, open_storage


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return open_storage(tmp_path / "run")
    return open_storage(f"memory://{uuid.uuid4().hex}/run")


def test_the_url_decides_where_files_are(tmp_path: Path) -> None:
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)
    assert isinstance(open_storage("memory://x"), RemoteStorage)
    with pytest.raises(ValueError, match="no-such-protocol"):
        open_storage("no-such-protocol://x")


def test_a_file_is_what_was_written(storage: Storage) -> None:
    check_files(storage)


def check_files(storage: Storage) -> None:
    chunks = [b"abc", bytearray(b"defg"), memoryview(b"hij")]
    storage.write("tag/a/file", chunks)
    storage.write("tag/empty", [])
    assert storage.read("tag/a/file") == b"abcdefghij"
    assert storage.read("tag/a/file", 2, 5) == b"cde"
    assert storage.read("tag/a/file", 8) == b"ij"
    assert bytes(storage.map("tag/a/file")) == b"abcdefghij" and bytes(storage.map("tag/empty")) == b""
    assert (storage.size("tag/a/file"), storage.size("tag/empty")) == (10, 0)
    assert storage.list() == ["tag"] and storage.list("tag") == ["a", "empty"] and storage.list("tag/a") == ["file"]
    assert storage.list("nothing") == [] and storage.list("tag/empty/x") == []
    assert storage.exists("tag/empty") and storage.exists("tag/a/file") and not storage.exists("tag/a/other")
    storage.write("tag/a/file", [b"new"])
    assert storage.read("tag/a/file") == b"new"
    for missing in (storage.read, storage.map, storage.size):
        with pytest.raises(FileNotFoundError):
            missing("tag/nothing")
    assert [storage.kind(path) for path in ("tag", "tag/a/file", "nothing")] == ["folder", "file", ""]
    storage.sync("tag")

    storage.rename("tag", "other", first="empty", last="a/file")
    assert storage.list() == ["other"] and storage.list("other") == ["a", "empty"]
    assert storage.read("other/a/file") == b"new"
    storage.remove("other/empty")
    storage.remove("other/empty")  # it is not there any more
    assert storage.list("other") == ["a"]
    storage.remove_tree("other")
    storage.remove_tree("other")
    assert not storage.exists("other") and storage.list() == []


def test_a_write_that_fails_leaves_what_was_there(storage: Storage) -> None:
    """On a local disk the old file; elsewhere none, at least not half of one."""

    def chunks():
        yield b"half"
        raise OSError("no space left")

    storage.write("tag/file", [b"old"])
    with pytest.raises(OSError, match="no space left"):
        storage.write("tag/file", chunks())
    if isinstance(storage, LocalStorage):
        assert storage.read("tag/file") == b"old"
    assert storage.list("tag") in ([], ["file"])
    assert not storage.exists("tag/file") or storage.read("tag/file") == b"old"


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_a_write_that_writes_less_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The operating system may write less than it is asked to: 2 GiB at once on Linux, what is left before a limit."""

    class Short(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:most])

    monkeypatch.setattr(storage_module, "open", lambda path, mode, buffering: Short(path, mode), raising=False)
    chunks = [bytes(range(50)), torch.arange(6, dtype=torch.int32).numpy(), b"", b"end"]
    LocalStorage(tmp_path).write("a", chunks)
    monkeypatch.undo()
    assert (tmp_path / "a").read_bytes() == b"".join(bytes(memoryview(chunk).cast("B")) for chunk in chunks)


def test_renaming_without_an_atomic_rename_moves_one_file_first_and_last() -> None:
    """Between two steps the folder is never complete in both places, and complete in one until it is in the other.

    Remains of both have the file that says whose they are.
    """
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    for name in ("a", "checkpoint", "done", "z"):
        storage.write(f"old/{name}", [name.encode()])
    steps = []
    filesystem = storage._filesystem
    copy = filesystem.cp_file
    remove = filesystem.rm_file
    filesystem.cp_file = lambda source, target: (steps.append(target.rpartition("/")[2]), copy(source, target))
    filesystem.rm_file = lambda path: (steps.append(f"-{path.rpartition('/')[2]}"), remove(path))
    try:
        storage.rename("old", "new", first="checkpoint", last="done")
    finally:
        del filesystem.cp_file, filesystem.rm_file
    assert steps == ["checkpoint", "a", "z", "done", "-done", "-z", "-a", "-checkpoint"]
    assert storage.list("new") == ["a", "checkpoint", "done", "z"] and storage.list() == ["new"]


def test_local_files_and_names_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is synced before it gets its name, and a new folder's name when it is made."""
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        events.append(f"name {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    storage = open_storage(tmp_path / "run" / "tag")
    storage.make_folder()
    storage.write("file", [b"x"])
    storage.sync()
    assert events == ["sync run", f"sync {tmp_path.name}", "sync file.partial", "name file", "sync tag"]


def test_a_map_is_private(tmp_path: Path) -> None:
    storage = open_storage(tmp_path)
    storage.write("file", [b"abc"])
    storage.map("file")[0] = 0
    assert storage.read("file") == b"abc"


def test_a_remote_map_reads_the_bytes_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}")
    storage.write("file", [bytes(range(100))])
    monkeypatch.setattr(RemoteStorage, "_BLOCK", 16)
    content = storage.map("file", [(2, 5), (30, 70)])
    assert bytes(content) == bytes(value if 2 <= value < 5 or 30 <= value < 70 else 0 for value in range(100))
    assert bytes(storage.map("file")) == bytes(range(100))

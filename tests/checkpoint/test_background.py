"""A save beside the run: what all ranks learn of it, and when; on files that are not a model's."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuronx_dist import comm
from neuronx_dist.checkpoint import background
from neuronx_dist.checkpoint.agreement import agree, together
from neuronx_dist.checkpoint.background import CheckpointIOState, Save
from neuronx_dist.checkpoint.errors import CheckpointError
from neuronx_dist.checkpoint.storage import open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder, Entry
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from tests.support import forked
from tests.support.paths import ROOT

RANKS = 3


def begun(path: Path, tag: str, write: Callable[..., None], keep: int | None = None) -> Save:
    folder = CheckpointFolder(open_storage(path))
    with together("no"):
        if comm.rank("world") == 0:
            folder.begin(tag)
    return Save(folder, tag, write, {}, keep, comm.rank("world"), comm.size("world"))


def one_file(storage: Any, tag: str) -> None:
    storage.write(f"{tag}/part/{comm.rank('world')}", [b"content"])


def writer(content: bytes = b"content", fails_on: int | None = None, wait: threading.Event | None = None) -> Any:
    """Writes a file in two chunks; between them it waits, and fails on one rank."""
    rank = comm.rank("world")  # the thread that writes has no rank of its own

    def write(storage: Any, tag: str) -> None:
        def chunks() -> Any:
            yield content[:3]
            if wait is not None:
                assert wait.wait(30)
            if rank == fails_on:
                raise OSError(28, "No space left on device")
            yield content[3:]

        storage.write(f"{tag}/part/{rank}", chunks())

    return write


def complete(path: Path) -> list[str]:
    return [tag.name for tag in CheckpointFolder(open_storage(path)).complete()]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_holds_the_files_of_all_ranks(tmp_path: Path, in_background: bool) -> None:
    def rank() -> None:
        save = begun(tmp_path, "a", writer())
        save.start() if in_background else save.write_own_files()
        save.settle()
        assert complete(tmp_path) == ["a"]

    threads.run(Mesh(RANKS), rank)
    tag = CheckpointFolder(open_storage(tmp_path)).find("a")
    assert tag.files == {f"part/{number}": Entry(7) for number in range(RANKS)}
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["checkpoint", "done", "part"]
    assert (tmp_path / "a" / "part" / "2").read_bytes() == b"content"


def test_it_is_complete_without_another_call(tmp_path: Path) -> None:
    """Rank 0 learns from notes in the folder that all have written."""

    def rank() -> None:
        save = begun(tmp_path, "a", writer())
        save.start()
        comm.barrier()
        until(lambda: complete(tmp_path) == ["a"])
        save.settle()

    threads.run(Mesh(RANKS), rank)
    assert not (tmp_path / "a" / ".written").exists()


def test_it_is_invisible_until_the_slowest_rank_has_written(tmp_path: Path) -> None:
    wait = threading.Event()

    def rank() -> None:
        save = begun(tmp_path, "a", writer(wait=wait if comm.rank("world") == 1 else None))
        save.start()
        if comm.rank("world") == 0:
            until(lambda: (tmp_path / "a" / ".written" / "2").exists())
            time.sleep(0.05)
            assert complete(tmp_path) == []
            wait.set()
        save.settle()
        assert complete(tmp_path) == ["a"]

    threads.run(Mesh(RANKS), rank)


def test_only_the_ranks_themselves_communicate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    gather = comm.gather_objects

    def noted(*args: Any) -> Any:
        names.add(threading.current_thread().name)
        return gather(*args)

    monkeypatch.setattr(comm, "gather_objects", noted)
    test_it_is_complete_without_another_call(tmp_path)
    assert names == {f"rank{number}" for number in range(RANKS)}


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("fails_on", range(RANKS))
def test_a_failure_is_raised_on_all_ranks_and_the_run_goes_on(
    tmp_path: Path, fails_on: int, in_background: bool
) -> None:
    def rank() -> str:
        for tag in ("a", "b"):
            save = begun(tmp_path, tag, writer())
            save.write_own_files()
            save.settle()
        save = begun(tmp_path, "b", writer(b"another", fails_on))
        save.start() if in_background else save.write_own_files()
        with pytest.raises(CheckpointError) as error:
            save.settle()
        assert complete(tmp_path) == ["b", "a"]  # the old `b`
        save = begun(tmp_path, "c", writer())
        save.start()
        save.settle()
        return str(error.value)

    messages = threads.run(Mesh(RANKS), rank)
    assert len(set(messages)) == 1
    assert f"{tmp_path}/b could not be written: rank {fails_on}: OSError: [Errno 28] No space left" in messages[0]
    assert complete(tmp_path) == ["c", "b", "a"] and (tmp_path / "b" / "part" / "0").read_bytes() == b"content"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_rank_0_learns_of_a_failure_from_its_note(tmp_path: Path) -> None:
    """So a job that ends now does not wait for the rank."""

    def rank() -> None:
        save = begun(tmp_path, "a", writer(fails_on=2))
        save.start()
        assert save._thread is not None
        save._thread.join(30)
        assert not save._thread.is_alive()
        if comm.rank("world") == 0:
            assert "rank 2: OSError: [Errno 28] No space left" in str(save.error)
        with pytest.raises(CheckpointError, match="rank 2: OSError"):
            save.settle()

    threads.run(Mesh(RANKS), rank)
    assert list(tmp_path.iterdir()) == []


def test_what_fails_when_it_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def commit(*args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(CheckpointFolder, "commit", commit)

    def rank() -> None:
        save = begun(tmp_path, "a", writer())
        save.start()
        with pytest.raises(
            CheckpointError, match="could not be written: rank 0: PermissionError: .* Permission denied"
        ):
            save.settle()

    threads.run(Mesh(RANKS), rank)


def test_a_rank_that_never_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up, as a job may end without it."""
    monkeypatch.setenv("NEURONX_DIST_CHECKPOINT_TIMEOUT", "0.1")
    wait = threading.Event()

    def rank() -> None:
        save = begun(tmp_path, "a", writer(wait=wait if comm.rank("world") == 1 else None))
        save.start()
        if comm.rank("world") == 0:
            assert save._thread is not None
            save._thread.join(30)
            assert "ranks [1] did not report within 0.1 s that their files are written" in str(save.error)
            wait.set()
        with pytest.raises(CheckpointError, match=r"ranks \[1\] did not report"):
            save.settle()

    threads.run(Mesh(RANKS), rank)
    assert complete(tmp_path) == []


def test_a_save_that_is_superseded_leaves_nothing(tmp_path: Path) -> None:
    waits = [threading.Event() for _ in range(RANKS)]

    def rank() -> None:
        state = CheckpointIOState()
        number = comm.rank("world")
        state.pending = begun(tmp_path, "a", writer(wait=waits[number]))
        state.pending.start()
        save = state.pending
        threading.Timer(0.05, waits[number].set).start()  # it is in the midst of a file, and looks before the next part
        state.settle(supersede=True)
        assert state.pending is None and isinstance(save.error, background._Superseded)
        assert complete(tmp_path) == []
        state.pending = begun(tmp_path, "b", writer())
        state.pending.start()
        state.settle()

    threads.run(Mesh(RANKS), rank)
    assert complete(tmp_path) == ["b"] and [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_rank_that_supersedes_before_the_others_is_no_failure(tmp_path: Path) -> None:
    """Rank 0, which waits for notes, still trains when rank 1 has ended its own part."""
    wait = threading.Event()

    def rank() -> None:
        state, number = CheckpointIOState(), comm.rank("world")
        save = state.pending = begun(tmp_path, "a", writer(wait=wait if number == 1 else None))
        save.start()
        assert save._thread is not None
        if number == 1:
            save.superseded.set()
            wait.set()
            save._thread.join(30)
        comm.barrier()
        if number == 0:
            save._thread.join(0.2)  # time to read what rank 1 may have left
            assert save._thread.is_alive() and save.error is None
        state.settle(supersede=True)

    threads.run(Mesh(RANKS), rank)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_is_complete_cannot_be_superseded(tmp_path: Path) -> None:
    def rank() -> None:
        state = CheckpointIOState()
        state.pending = begun(tmp_path, "a", writer())
        state.pending.start()
        comm.barrier()
        until(lambda: complete(tmp_path) == ["a"])
        state.settle(supersede=True)

    threads.run(Mesh(RANKS), rank)
    assert complete(tmp_path) == ["a"]


def test_agreement() -> None:
    def rank() -> str:
        number = comm.rank("world")
        agree(None, "nothing")
        with pytest.raises((CheckpointError, ValueError)) as error, together("it was not done"):
            if number:
                raise (ValueError("a bad value") if number == 1 else OSError(number))
        return f"{type(error.value).__name__}: {error.value}"

    everyone = "it was not done: rank 1: ValueError: a bad value; rank 2, 3: OSError: 2"
    messages = threads.run(Mesh(4), lambda: rank() if comm.rank("world") < 3 else _as_rank_2(rank))
    assert messages[1] == "ValueError: a bad value"
    assert messages[0] == messages[2] == messages[3] == f"CheckpointError: {everyone}"


def _as_rank_2(rank: Callable[[], str]) -> str:
    agree(None, "nothing")
    with pytest.raises(CheckpointError) as error:
        agree(OSError(2), "it was not done")
    return f"CheckpointError: {error.value}"


AT_EXIT = """
import sys, time
import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.background import Save
from neuronx_dist.checkpoint.storage import open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder

def write(storage, tag):
    def chunks():
        yield b"first"
        time.sleep(0.5)
        if sys.argv[2] == "fails":
            raise OSError(28, "No space left on device")
        yield b"second"
    storage.write(f"{tag}/file", chunks())

with comm.as_rank(nxd.Mesh(1), 0):
    folder = CheckpointFolder(open_storage(sys.argv[1]))
    folder.begin("a")
    Save(folder, "a", write, {}, None, 0, 1).start()
if sys.argv[2] == "raises":
    raise ValueError("the run failed")
"""


@pytest.mark.parametrize("how", ["ends", pytest.param("raises", marks=pytest.mark.full), "fails"])
def test_at_exit_a_save_is_finished(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(AT_EXIT)
    result = forked.run([str(script), str(tmp_path / "run"), how])
    assert (result.codes == [0]) == (how != "raises"), result.errors
    assert complete(tmp_path / "run") == ([] if how == "fails" else ["a"])
    assert ("[rank 0] checkpoint a failed: [Errno 28] No space left" in result.errors[0]) == (how == "fails")


@pytest.mark.slow
def test_at_exit_a_rank_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    """A second after the folder has stopped to grow, here; while another rank writes on, its file is waited for."""
    script = tmp_path / "script.py"
    script.write_text(
        "import neuronx_dist.checkpoint.background as background\nbackground._AT_EXIT = 1.0\n"
        + AT_EXIT.replace("{}, None, 0, 1", "{}, None, 0, 2")
    )
    command = [sys.executable, str(script), str(tmp_path / "run"), "ends"]
    started = subprocess.Popen(command, cwd=ROOT, env=_environment(), stderr=subprocess.PIPE, text=True)
    growing = tmp_path / "run" / "a" / "other.partial"
    while not (tmp_path / "run" / "a" / "file").exists():
        time.sleep(0.02)
    begin = time.monotonic()
    while time.monotonic() < begin + 3:
        with open(growing, "a") as file:
            file.write("more")
        assert started.poll() is None
        time.sleep(0.3)
    _, text = started.communicate(timeout=30)
    assert "[rank 0] checkpoint a failed: ranks [1] did not report within 1 s" in text, text
    assert "they were killed, or ended early" in text and complete(tmp_path / "run") == []


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}

"""Errors of the public calls: on all ranks, and the run goes on."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.dcp.checksums import with_checksums
from neuronx_dist.checkpoint.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from neuronx_dist.checkpoint.storage import LocalStorage, open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder, Entry
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from tests.checkpoint.saved_runs import on_ranks, saved
from tests.checkpoint.small_run import Run, equal


def test_nothing_to_load(tmp_path: Path) -> None:
    def rank() -> None:
        for folder in (tmp_path, tmp_path / "nothing"):
            with pytest.raises(CheckpointError, match="there is no complete checkpoint in"):
                nxd.load_checkpoint(folder)
            with pytest.raises(CheckpointError, match="there is no checkpoint 'a'"):
                nxd.load_checkpoint(folder, "a")
        with pytest.raises((CheckpointError, ValueError), match="'../a' cannot name a checkpoint"):
            nxd.load_checkpoint(tmp_path, "../a")

    on_ranks(rank)


def test_another_model(tmp_path: Path) -> None:
    saved(tmp_path, "a")

    def rank() -> None:
        run = Run(width=32)
        before = run.values()
        with pytest.raises(
            CheckpointMismatch,
            match=r"model.up.weight has shape \(16, 8\) in the checkpoint and \(32, 8\) in this model",
        ):
            run.load(tmp_path)
        assert equal(run.values(), before)
        run.train()

    on_ranks(rank)


def test_a_rank_that_saves_something_else(tmp_path: Path) -> None:
    def rank() -> None:
        number = comm.rank("world")
        run = Run()
        with pytest.raises(CheckpointError, match="rank 0 saves .*/a, rank 3 .*/b"):
            run.save(tmp_path, "b" if number == 3 else "a")
        with pytest.raises((CheckpointError, ValueError), match="tag 'a/b' cannot name a checkpoint") as error:
            run.save(tmp_path, "a/b" if number == 2 else "a")
        assert isinstance(error.value, ValueError if number == 2 else CheckpointError)
        assert not list(tmp_path.iterdir())
        comm.barrier()
        run.save(tmp_path, "a")

    on_ranks(rank)


@pytest.mark.parametrize("then", [comm.barrier, lambda: None], ids=["a barrier", "the end"])
def test_a_save_on_rank_0_alone_is_an_error_at_the_users_line(tmp_path: Path, then: Callable[[], None]) -> None:
    messages = {}

    def rank() -> None:
        run = Run()
        try:
            if comm.rank("world") == 0:
                nxd.save_checkpoint(tmp_path, "a", run.model)  # the line that the message names
            then()
        except comm.CommError as error:
            messages[comm.rank("world")] = str(error)
            raise

    with pytest.raises(comm.CommError):
        threads.run(Mesh(2, tp=2), rank)
    message = messages[0]
    line = next(n for n, code in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line that" in code)
    assert f"{__file__}:{line} (in save_checkpoint)" in message and "cannot be inside of an `if rank == 0:`" in message


@pytest.mark.parametrize("options", [dict(num_kept_ckpts=0), dict(num_kept_ckpts=-2), dict(when_busy="drop")])
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} must be"):
        on_ranks(lambda: Run().save(tmp_path, "a", **options), Mesh(1))


class Opaque:
    pass


def test_user_content_that_could_not_be_read_back(tmp_path: Path) -> None:
    def rank() -> None:
        run = Run()
        with pytest.raises((CheckpointError, ValueError), match=r"user_content\['b'\] holds a Opaque that cannot be"):
            run.save(tmp_path, "a", user_content={"a": 1, "b": Opaque()})
        assert not nxd.has_checkpoint(tmp_path)
        comm.barrier()
        run.save(tmp_path, "a")

    on_ranks(rank)


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("file", ["user_content.pt", "scheduler.pt", ".metadata", "random"])
def test_a_malicious_pickle_does_not_run(tmp_path: Path, file: str) -> None:
    """Whoever wrote it could write fitting checksums too."""
    saved(tmp_path / "run", "a")
    folder = CheckpointFolder(open_storage(tmp_path / "run"))
    name = file if file != "random" else "random/dp_rank_00_cp_rank_00_tp_rank_00_pp_rank_00.pt"
    bomb = pickle.dumps(Bomb(tmp_path / "ran"))
    buffer = io.BytesIO()
    torch.save(Bomb(tmp_path / "ran"), buffer)
    for content in (bomb, buffer.getvalue()):
        if file == ".metadata":
            content = b"".join(map(bytes, with_checksums([content])))
        (tmp_path / "run" / "a" / name).write_bytes(content)
        crc32 = None if file == ".metadata" else zlib.crc32(content)
        folder.commit("a", {**(folder.find("a").files or {}), name: Entry(len(content), crc32)})
        assert folder.damage(folder.find("a")) == []
        with pytest.raises(CheckpointCorrupted, match=file):
            on_ranks(lambda: Run().load(tmp_path / "run"), Mesh(1))
    assert not (tmp_path / "ran").exists()
    pickle.loads(bomb)
    assert (tmp_path / "ran").exists()  # it would have


def fails(monkeypatch: pytest.MonkeyPatch, error: OSError, path: str) -> None:
    """Writing a file of this name fails in its midst, on whatever rank it is written."""
    write = LocalStorage.write

    def failing(self: LocalStorage, name: str, chunks: Any) -> None:
        def some() -> Any:
            yield next(iter(chunks), b"")
            raise error

        write(self, name, some() if path in name else chunks)

    monkeypatch.setattr(LocalStorage, "write", failing)


@pytest.mark.each_value
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("path", ["__1_0.distcp", "__0_0.distcp", ".metadata", "done", "checkpoint", "tp_rank_01"])
def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, async_save: bool) -> None:
    """All ranks raise, the older checkpoints are there, and training goes on as without a save."""

    def rank() -> None:
        run, undisturbed = Run(), Run()
        run.train()
        run.save(tmp_path, "a")
        comm.barrier()
        if comm.rank("world") == 0:
            fails(monkeypatch, OSError(28, "No space left on device"), f"b/{path}" if path[0] != "t" else path)
        comm.barrier()
        with pytest.raises(CheckpointError, match="/b could not be .*No space left on device"):
            run.save(tmp_path, "b", async_save=async_save)
            run.train()
            nxd.finalize_checkpoint()
        comm.barrier()
        if comm.rank("world") == 0:
            monkeypatch.undo()
        comm.barrier()
        assert sorted(os.listdir(tmp_path)) == ["a"]
        run.train(4 - run.step)
        undisturbed.train(4)
        assert equal(run.values(), undisturbed.values())
        comm.barrier()
        run.save(tmp_path, "b")
        assert Run().load(tmp_path) == {"step": 4}

    on_ranks(rank, Mesh(2, tp=2))


def test_an_error_of_the_background_is_raised_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[Run], Any]] = [
        lambda run: run.save(tmp_path, "c"),
        lambda run: run.load(tmp_path),
        lambda run: nxd.finalize_checkpoint(),
    ]

    def rank() -> None:
        run = Run()
        run.save(tmp_path, "a")
        comm.barrier()
        if comm.rank("world") == 0:
            fails(monkeypatch, PermissionError(13, "Permission denied"), "b/__1_0.distcp")
        comm.barrier()
        for call in calls:
            run.save(tmp_path, "b", async_save=True)
            with pytest.raises(CheckpointError, match="b could not be written: .*rank 1: PermissionError"):
                call(run)
            call(run)  # once is enough

    on_ranks(rank, Mesh(2))


def test_a_folder_that_vanishes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank() -> None:
        run = Run()
        run.save(tmp_path / "run", "a", async_save=True)
        nxd.finalize_checkpoint()
        comm.barrier()
        if comm.rank("world") == 0:
            commit = CheckpointFolder.commit

            def vanished(self: Any, *args: Any) -> None:
                shutil.rmtree(tmp_path / "run")
                commit(self, *args)

            monkeypatch.setattr(CheckpointFolder, "commit", vanished)
        comm.barrier()
        with pytest.raises(CheckpointError, match="b could not be written: rank 0: FileNotFoundError"):
            run.save(tmp_path / "run", "b", async_save=True)
            nxd.finalize_checkpoint()
        comm.barrier()
        monkeypatch.undo()
        comm.barrier()
        with pytest.raises(CheckpointError, match="there is no complete checkpoint"):
            run.load(tmp_path / "run")
        run.save(tmp_path / "run", "c")

    on_ranks(rank, Mesh(2))


def test_a_path_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def rank() -> None:
        with pytest.raises(CheckpointError, match="file/a could not be begun: rank 0: (NotADirectory|FileExists)Error"):
            Run().save(tmp_path / "file", "a")

    on_ranks(rank)


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, each with a disk of its own under the same name."""
    monkeypatch.setattr("neuronx_dist.checkpoint.api._PATIENCE", 0.1)

    def has_begun(self: CheckpointFolder, name: str) -> bool:
        return comm.rank("world") == 0

    def rank() -> None:
        with pytest.raises(CheckpointError, match="created .*/a, but this rank's host does not see it"):
            Run().save(tmp_path, "a")

    monkeypatch.setattr(CheckpointFolder, "has_begun", has_begun)
    on_ranks(rank, Mesh(2))

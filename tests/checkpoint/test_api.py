"""The public calls: what a script sees of checkpoints, on ranks as threads."""

from __future__ import annotations

import inspect
import io
import itertools
import os
import pickle
import shutil
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint import background
from neuronx_dist.checkpoint.checksums import with_checksums
from neuronx_dist.checkpoint.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch
from neuronx_dist.checkpoint.storage import LocalStorage, RemoteStorage, open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder, Entry
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from tests.checkpoint.small_run import Net, Run, equal

MESH = Mesh(4, tp=2)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def on_ranks(function: Callable[[], Any], mesh: Mesh = MESH) -> list[Any]:
    return threads.run(mesh, function)


def saved(folder: Path, *tags: str, **options: Any) -> None:
    """A run that was saved after each of so many steps."""

    def rank() -> None:
        run = Run()
        for tag in tags:
            run.train()
            run.save(folder, tag, **options)

    on_ranks(rank)


def test_arguments_are_nxds() -> None:
    save, load = (inspect.signature(call) for call in (nxd.save_checkpoint, nxd.load_checkpoint))
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [name for name, parameter in save.parameters.items() if parameter.kind is positional]
    assert " ".join(names) == (
        "checkpoint_dir_str tag model optimizer scheduler user_content num_workers use_xser num_kept_ckpts async_save "
        "zero1_optimizer use_zero1_dcp avoid_saving_lower_precision_weights"
    )
    assert (
        " ".join(name for name in load.parameters if name != "device")
        == "path tag model optimizer scheduler num_workers strict use_zero1_dcp"
    )
    assert {name: save.parameters[name].default for name in ("num_workers", "num_kept_ckpts", "async_save")} == {
        "num_workers": 8,
        "num_kept_ckpts": None,
        "async_save": False,
    }


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("url", ["", "memory://"])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, url: str, zero1: bool, async_save: bool) -> None:
    folder = f"{url}{tmp_path}/run"

    def rank() -> None:
        assert not nxd.has_checkpoint(folder)
        comm.barrier()
        run = Run(zero1=zero1)
        run.train(3)
        values = run.values()
        run.save(folder, "step_3", async_save=async_save)
        losses = run.train(2)  # before it is written, perhaps
        nxd.finalize_checkpoint()
        assert nxd.has_checkpoint(folder)

        other = Run(seed=1, zero1=zero1)
        assert other.load(folder) == {"step": 3}
        assert equal(other.values(), values) and other.scheduler.state_dict()["last_epoch"] == 3
        assert other.train(2) == losses and equal(other.values(), run.values())

    on_ranks(rank)


def test_a_tag_may_be_a_number(tmp_path: Path) -> None:
    """Of which it is not said that another one was loaded instead."""

    def rank() -> None:
        run = Run()
        run.save(tmp_path, 100)  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run.load(tmp_path, 100) == {"step": 0}  # type: ignore[arg-type]

    on_ranks(rank)


def test_arguments_without_effect_are_said_once(tmp_path: Path) -> None:
    """Those of which a script would see no effect; the others change how fast it is."""

    def rank() -> None:
        run = Run()
        run.save(tmp_path, "a", num_workers=1, use_xser=True, avoid_saving_lower_precision_weights=True)
        run.save(tmp_path, "b", num_workers=1, zero1_optimizer=True, use_zero1_dcp=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_ranks(rank)
    assert [str(each.message).partition(" has no effect")[0] for each in caught] == [
        "use_xser",
        "avoid_saving_lower_precision_weights",
    ]


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler"])
def test_state_dicts_are_no_models(tmp_path: Path, name: str) -> None:
    def rank() -> None:
        run = Run()
        run.save(tmp_path, "a")
        parts = {each: getattr(run, each) for each in ("model", "optimizer", "scheduler")}
        parts[name] = dict(parts[name].state_dict())
        for call in (nxd.save_checkpoint, nxd.load_checkpoint):
            with pytest.raises(TypeError, match=f"{name} is a dict: give the {name} itself, which is no state dict"):
                call(tmp_path, "a", **parts)

    on_ranks(rank)


def test_parts(tmp_path: Path) -> None:
    """Each part may be left out of a save, and of a load."""

    def rank() -> None:
        run = Run()
        run.train(3)
        nxd.save_checkpoint(tmp_path, "weights", run.model)
        nxd.save_checkpoint(tmp_path, "content", user_content=[1, "a", {"b": torch.arange(3)}, None])
        assert nxd.load_checkpoint(tmp_path, "weights", Run(seed=1).model) is None
        content = nxd.load_checkpoint(tmp_path, "content")
        assert content[:2] == [1, "a"] and content[2]["b"].tolist() == [0, 1, 2]
        with pytest.raises(CheckpointError, match="weights was saved without a scheduler"):
            nxd.load_checkpoint(tmp_path, "weights", run.model, scheduler=run.scheduler)
        with pytest.raises(CheckpointError, match="optimizer"):
            nxd.load_checkpoint(tmp_path, "weights", run.model, run.optimizer)
        other = Run(seed=1)
        run.save(tmp_path, "all")
        nxd.load_checkpoint(tmp_path, "all", other.model)
        assert equal(list(other.model.parameters()), list(run.model.parameters()))

    on_ranks(rank)


def test_what_lies_in_the_folder(tmp_path: Path) -> None:
    saved(tmp_path, "step_1")
    names = {str(path.relative_to(tmp_path / "step_1")) for path in (tmp_path / "step_1").rglob("*") if path.is_file()}
    random = {f"random/dp_rank_0{dp}_cp_rank_00_tp_rank_0{tp}_pp_rank_00.pt" for dp in (0, 1) for tp in (0, 1)}
    data = {f"__{rank}_0.distcp" for rank in range(4)}
    assert names == {"checkpoint", "done", ".metadata", "scheduler.pt", "user_content.pt", *data, *random}
    assert torch.load(tmp_path / "step_1" / "user_content.pt", weights_only=True) == {"step": 1}
    assert set(CheckpointFolder(open_storage(tmp_path)).find("step_1").files or {}) == names - {"checkpoint", "done"}


def test_rotation(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c", "d", num_kept_ckpts=2)
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


# --- damage ---


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    """200 times with NXD_FULL=1. The error says whether weights were overwritten; nothing else ever is."""
    saved(tmp_path, "a")
    count = 200 if os.environ.get("NXD_FULL") else 24
    generator = torch.Generator().manual_seed(0)
    files = files_of(tmp_path / "a")
    ends = list(itertools.accumulate(path.stat().st_size for path in files))
    positions = torch.randint(0, 8 * ends[-1], (count,), generator=generator).tolist()
    positions += [8 * end - 1 for end in ends]  # and the last bit of each file

    def rank() -> None:
        run = Run(seed=1)
        run.train()
        weights, before, overwritten = len([*run.model.parameters()]), run.values(), 0
        for position in positions:
            number = next(index for index, end in enumerate(ends) if position < 8 * end)
            start = ends[number - 1] if number else 0
            if comm.rank("world") == 0:
                flip(files[number], position - 8 * start)
            comm.barrier()
            with pytest.raises(CheckpointCorrupted) as error:
                run.load(tmp_path, "a")
            message, now = str(error.value), run.values()
            assert files[number].name in message, position
            assert equal(now[weights:], before[weights:]) and run.scheduler.last_epoch == 1
            if "nothing was changed" in message:
                assert equal(now, before)
            else:
                assert "weights of the model were overwritten in part" in message
                before, overwritten = now, overwritten + 1
            comm.barrier()
            if comm.rank("world") == 0:
                flip(files[number], position - 8 * start)
            comm.barrier()
        assert overwritten
        run.load(tmp_path, "a")

    on_ranks(rank, Mesh(2))


@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_files_that_are_not_whole(tmp_path: Path, damage: str) -> None:
    """Each is named, on all ranks."""
    saved(tmp_path, "a")
    paths = [path for path in files_of(tmp_path / "a") if path.name not in ("done", "checkpoint")]

    def rank() -> None:
        run = Run()
        for path in paths:
            content = path.read_bytes()
            comm.barrier()
            if comm.rank("world") == 0:
                path.unlink() if damage == "missing" else path.write_bytes(content[:-1] if damage[0] == "t" else b"")
            comm.barrier()
            said = "is missing" if damage == "missing" else f"instead of {len(content)}"
            with pytest.raises(CheckpointCorrupted, match=f"a is damaged: .*{path.name} .*{said}.*nothing was changed"):
                run.load(tmp_path, "a")
            comm.barrier()
            path.write_bytes(content)
            comm.barrier()
        run.load(tmp_path, "a")

    on_ranks(rank, Mesh(2, tp=2))


def test_a_damaged_checkpoint_makes_room_for_an_older_one(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c")
    flip(tmp_path / "c" / "__0_0.distcp", 1000)
    (tmp_path / "b" / "scheduler.pt").unlink()

    def rank() -> None:
        assert Run(seed=1).load(tmp_path) == {"step": 1}

    with warnings.catch_warnings(record=True) as caught:  # of all ranks: which are threads
        warnings.simplefilter("always")
        on_ranks(rank)
    said = [str(each.message) for each in caught if "is damaged" in str(each.message)]
    assert len(said) == 1 and "\n" not in said[0]
    assert f"checkpoint {tmp_path}/c is damaged: c/__0_0.distcp" in said[0] and said[0].endswith(
        "; a is loaded instead"
    )


def test_a_tag_whose_replacement_was_interrupted(tmp_path: Path) -> None:
    saved(tmp_path, "a")
    CheckpointFolder(open_storage(tmp_path)).begin("a")

    def rank() -> None:
        for tag in (None, "a"):
            assert Run().load(tmp_path, tag) == {"step": 1}

    with pytest.warns(UserWarning, match="checkpoint a was being replaced when its job ended; a.previous is loaded"):
        on_ranks(rank, Mesh(1))


def test_each_file_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a storage that is not local a rank reads no byte twice, and of the weights no other rank's."""
    folder = "memory://read-once"
    saved(folder, "a")  # type: ignore[arg-type]
    taken: dict[tuple[int, str], list[tuple[int, int]]] = {}
    read, cat_ranges = RemoteStorage.read, type(open_storage(folder)._filesystem).cat_ranges  # type: ignore[attr-defined]

    def noted(self: RemoteStorage, path: str, start: int = 0, stop: int | None = None) -> bytes:
        content = read(self, path, start, stop)
        taken.setdefault((comm.rank("world"), path), []).append((start, start + len(content)))
        return content

    def noted_ranges(self: Any, paths: list[str], starts: list[int], ends: list[int], **options: Any) -> Any:
        for path, start, end in zip(paths, starts, ends):
            taken.setdefault((comm.rank("world"), path.partition("read-once/")[2]), []).append((start, end))
        return cat_ranges(self, paths, starts, ends, **options)

    def rank() -> None:
        run = Run(seed=1)
        comm.barrier()
        if comm.rank("world") == 0:
            monkeypatch.setattr(RemoteStorage, "read", noted)
            monkeypatch.setattr(type(open_storage(folder)._filesystem), "cat_ranges", noted_ranges)  # type: ignore[attr-defined]
        comm.barrier()
        run.load(folder, "a")

    on_ranks(rank, Mesh(4, tp=2))
    of_weights = [0, 0, 0, 0]
    for (number, path), ranges in taken.items():
        if path in ("a/done", "a/checkpoint"):
            continue
        ends = [0, *(stop for _, stop in sorted(ranges))]
        assert all(start >= end for (start, _), end in zip(sorted(ranges), ends)), (path, ranges)
        if path.endswith(".distcp"):
            of_weights[number] += sum(stop - start for start, stop in ranges)
    storage = open_storage(folder)
    size = sum(storage.size(f"a/{name}") for name in storage.list("a") if name.endswith(".distcp"))
    assert len({path for _, path in taken if path.endswith(".distcp")}) == 4 and max(of_weights) < 0.75 * size


def test_a_damaged_checkpoint_leaves_no_values(tmp_path: Path) -> None:
    """The older one has to have all that was overwritten, `strict` or not; else the error says what is left."""

    def rank() -> None:
        run = Run()
        run.save(tmp_path, "small", model=run.model.up, optimizer=None)
        run.save(tmp_path, "whole", optimizer=None)
        comm.barrier()
        if comm.rank("world") == 0:
            weights = run.model.down.weight.detach().numpy().tobytes()
            (path,) = [each for each in (tmp_path / "whole").glob("*.distcp") if weights in each.read_bytes()]
            flip(path, 8 * path.read_bytes().index(weights))
        comm.barrier()
        with pytest.raises(CheckpointMismatch) as error:
            nxd.load_checkpoint(tmp_path, model=run.model, strict=False)
        assert "whole is damaged" in str(error.value) and "weights of the model were overwritten in part" in str(
            error.value
        )
        assert "missing in it: model.up.weight" in str(error.value)

    on_ranks(rank, Mesh(2))


# --- errors, on all ranks; the run goes on ---


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
        with pytest.raises(CheckpointMismatch, match=r"model.up.weight is \(16, 8\) there and \(32, 8\) here"):
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


@pytest.mark.parametrize("options", [dict(num_kept_ckpts=0), dict(when_busy="drop")])
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is to be"):
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
        with pytest.raises(CheckpointError, match="has made .*/a, and it is not there on this rank's host"):
            Run().save(tmp_path, "a")

    monkeypatch.setattr(CheckpointFolder, "has_begun", has_begun)
    on_ranks(rank, Mesh(2))


# --- beside the run ---


def test_values_are_those_of_the_call_and_the_memory_is_kept(tmp_path: Path) -> None:
    def rank() -> None:
        run = Run()
        addresses = set()
        for number in range(3):
            run.save(tmp_path, str(number), async_save=True)
            staged = background.state_of_rank().staged
            assert staged is not None
            addresses.add(staged.data_ptr())
            values = run.values()
            run.train()
            nxd.finalize_checkpoint()
            other = Run(seed=1)
            other.load(tmp_path)
            assert number == 0 or equal(other.values(), values)
        assert len(addresses) == 2  # without the optimizer's state, and with it

    on_ranks(rank, Mesh(2))


@pytest.mark.parametrize("when_busy, left", [("wait", ["a", "b"]), ("supersede", ["b"])])
def test_a_second_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when_busy: str, left: list[str]) -> None:
    """It waits for the first, or takes its place."""
    write = LocalStorage.write

    def slow(self: LocalStorage, name: str, chunks: Any) -> None:
        def some() -> Any:
            for chunk in chunks:
                time.sleep(0.05)
                yield chunk

        write(self, name, some() if "a/__" in name else chunks)

    monkeypatch.setattr(LocalStorage, "write", slow)

    def rank() -> None:
        run = Run()
        run.train()
        run.save(tmp_path, "a", async_save=True)
        run.train()
        run.save(tmp_path, "b", async_save=True, when_busy=when_busy)
        nxd.finalize_checkpoint()
        assert Run().load(tmp_path) == {"step": 2}

    on_ranks(rank, Mesh(2))
    assert sorted(os.listdir(tmp_path)) == left


def test_a_module_of_another_kind(tmp_path: Path) -> None:
    """`strict=False` loads what both have."""

    def rank() -> None:
        run = Run()
        run.save(tmp_path, "a", optimizer=None, scheduler=None)
        other = Net()
        other.extra = torch.nn.Linear(2, 2)
        with pytest.raises(CheckpointMismatch, match="model.extra.weight"):
            nxd.load_checkpoint(tmp_path, model=other)
        nxd.load_checkpoint(tmp_path, model=other, strict=False)
        assert torch.equal(other.up.weight, run.model.up.weight)

    on_ranks(rank)

"""Checkpoints with damaged or missing files."""

from __future__ import annotations

import itertools
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.errors import CheckpointCorrupted, CheckpointMismatch
from neuronx_dist.checkpoint.storage import RemoteStorage, open_storage
from neuronx_dist.checkpoint.tags import CheckpointFolder
from neuronx_dist.mesh import Mesh
from tests.checkpoint.saved_runs import on_ranks, saved
from tests.checkpoint.small_run import Run, equal


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["local", "memory"])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, storage: str) -> None:
    """200 times with NXD_FULL=1. Local files are verified before anything is changed; of others the error says so."""
    folder: Any = tmp_path if storage == "local" else f"memory://flipped-{tmp_path.name}"
    saved(folder, "a")
    count = 200 if os.environ.get("NXD_FULL") else 24
    generator = torch.Generator().manual_seed(0)
    opened = open_storage(folder)
    paths = [
        path
        for name in opened.list("a")
        for path in (
            [f"a/{name}"] if opened.kind(f"a/{name}") == "file" else [f"a/{name}/{x}" for x in opened.list(f"a/{name}")]
        )
    ]
    ends = list(itertools.accumulate(map(opened.size, paths)))
    positions = torch.randint(0, 8 * ends[-1], (count,), generator=generator).tolist()
    positions += [8 * end - 1 for end in ends]  # and the last bit of each file

    def flip_in_storage(path: str, bit: int) -> None:
        content = bytearray(opened.read(path))
        content[bit // 8] ^= 1 << bit % 8
        opened.write(path, [content])

    def rank() -> None:
        run = Run(seed=1)
        run.train()
        weights, before, overwritten = len([*run.model.parameters()]), run.values(), 0
        for position in positions:
            number = next(index for index, end in enumerate(ends) if position < 8 * end)
            bit = position - 8 * (ends[number - 1] if number else 0)
            if comm.rank("world") == 0:
                flip_in_storage(paths[number], bit)
            comm.barrier()
            with pytest.raises(CheckpointCorrupted) as error:
                run.load(folder, "a")
            message, now = str(error.value), run.values()
            assert paths[number].rpartition("/")[2] in message, position
            assert equal(now[weights:], before[weights:]) and run.scheduler.last_epoch == 1
            if "nothing was changed" in message:
                assert equal(now, before)
            else:
                assert "weights of the model were partly overwritten" in message
                before, overwritten = now, overwritten + 1
            comm.barrier()
            if comm.rank("world") == 0:
                flip_in_storage(paths[number], bit)
            comm.barrier()
        assert (overwritten > 0) == (storage == "memory")
        run.load(folder, "a")

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


def test_a_damaged_checkpoint_that_was_named_says_which_others_are_complete(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b")
    flip(tmp_path / "b" / "__0_0.distcp", 1000)

    def rank(tag: str, text: str) -> None:
        with pytest.raises(CheckpointCorrupted, match=f"/{tag} is damaged: .*{text}"):
            Run(seed=1).load(tmp_path, tag)

    on_ranks(lambda: rank("b", "others are complete: a$"))
    shutil.rmtree(tmp_path / "a")
    on_ranks(lambda: rank("b", "no other checkpoint is intact$"))


@pytest.mark.slow
def test_a_damaged_checkpoint_makes_room_for_an_older_one(tmp_path: Path) -> None:
    saved(tmp_path, "a", "b", "c")
    flip(tmp_path / "c" / "__0_0.distcp", 1000)
    (tmp_path / "b" / "scheduler.pt").unlink()

    def rank() -> None:
        assert Run(seed=1).load(tmp_path) == {"step": 1}

    with warnings.catch_warnings(record=True) as caught:  # of all ranks: which are threads
        warnings.simplefilter("always", UserWarning)
        on_ranks(rank)
    said = [str(warning.message) for warning in caught if "is damaged" in str(warning.message)]
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
    steps: dict[tuple[int, str], list[tuple[int, int]]] = {}
    read, cat_ranges = RemoteStorage.read, type(open_storage(folder)._filesystem).cat_ranges  # type: ignore[attr-defined]

    def noted(self: RemoteStorage, path: str, start: int = 0, stop: int | None = None) -> bytes:
        content = read(self, path, start, stop)
        steps.setdefault((comm.rank("world"), path), []).append((start, start + len(content)))
        return content

    def noted_ranges(self: Any, paths: list[str], starts: list[int], ends: list[int], **options: Any) -> Any:
        for path, start, end in zip(paths, starts, ends):
            steps.setdefault((comm.rank("world"), path.partition("read-once/")[2]), []).append((start, end))
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
    for (number, path), ranges in steps.items():
        if path in ("a/done", "a/checkpoint"):
            continue
        ends = [0, *(stop for _, stop in sorted(ranges))]
        assert all(start >= end for (start, _), end in zip(sorted(ranges), ends)), (path, ranges)
        if path.endswith(".distcp"):
            of_weights[number] += sum(stop - start for start, stop in ranges)
    storage = open_storage(folder)
    size = sum(storage.size(f"a/{name}") for name in storage.list("a") if name.endswith(".distcp"))
    assert len({path for _, path in steps if path.endswith(".distcp")}) == 4 and max(of_weights) < 0.75 * size


def test_a_damaged_checkpoint_leaves_no_values() -> None:
    """Loads remote files: the older checkpoint restores what was overwritten, or the error says what is left."""
    folder = "memory://no-values"
    storage = open_storage(folder)

    def rank() -> None:
        run = Run()
        run.save(folder, "small", model=run.model.up, optimizer=None)
        run.save(folder, "whole", optimizer=None)
        comm.barrier()
        if comm.rank("world") == 0:
            weights = run.model.down.weight.detach().numpy().tobytes()
            files = [f"whole/{name}" for name in storage.list("whole") if name.endswith(".distcp")]
            ((path, content),) = [(file, storage.read(file)) for file in files if weights in storage.read(file)]
            storage.write(path, [content.replace(weights, bytes(len(weights)))])
        comm.barrier()
        with pytest.raises(CheckpointMismatch) as error:
            nxd.load_checkpoint(folder, model=run.model, strict=False)
        assert "whole is damaged" in str(error.value) and "weights of the model were partly overwritten" in str(
            error.value
        )
        assert "missing in it: model.up.weight" in str(error.value)

    on_ranks(rank, Mesh(2))

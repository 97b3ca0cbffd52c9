"""The protocol on disk: what counts as a checkpoint, whatever happens, and which ones go."""

from __future__ import annotations

import json
import os
import time
import uuid
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuronx_dist import comm
from neuronx_dist.checkpoint.background import Save
from neuronx_dist.checkpoint.errors import CheckpointCorrupted, CheckpointError
from neuronx_dist.checkpoint.storage import LocalStorage, Storage, open_storage
from neuronx_dist.checkpoint.tags import DONE, MARKER, CheckpointFolder, Entry, check_tag
from neuronx_dist.mesh import Mesh

CRC32_OF_X = 0x8CDC1683


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> CheckpointFolder:
    url = tmp_path / "run" if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"
    return CheckpointFolder(open_storage(url))


def save(folder: CheckpointFolder, name: str, content: bytes = b"x") -> None:
    folder.begin(name)
    folder.storage.write(f"{name}/file", [content])
    folder.commit(name, {"file": Entry(1, CRC32_OF_X)})
    folder.clean(name)


def names(folder: CheckpointFolder) -> list[str]:
    return [tag.name for tag in folder.complete()]


def test_a_checkpoint_is_complete_when_done_is_there(folder: CheckpointFolder) -> None:
    assert names(folder) == []
    folder.begin("a")
    folder.storage.write("a/file", [b"x"])
    assert names(folder) == [] and folder.storage.list("a") == [MARKER, "file"]
    with pytest.raises(
        CheckpointError, match="'a' in .* is incomplete: its save was interrupted; there is no complete"
    ):
        folder.find("a")
    folder.commit("a", {"file": Entry(1, CRC32_OF_X)})
    assert names(folder) == ["a"] and folder.find("a").files == {"file": Entry(1, CRC32_OF_X)}
    with pytest.raises(CheckpointError, match="there is no checkpoint 'b' in .*; complete are: a"):
        folder.find("b")


def test_the_newest_is_the_one_that_was_saved_last(folder: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever names and clocks say: the host of rank 0 may be another one after a restart."""
    save(folder, "b")
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    save(folder, "c")
    save(folder, "a")
    assert names(folder) == ["a", "c", "b"]


def test_a_copied_folder_keeps_its_order(tmp_path: Path) -> None:
    folder = CheckpointFolder(open_storage(tmp_path))
    for name in ("a", "b"):
        save(folder, name)
    os.utime(tmp_path / "a" / DONE, (time.time() + 100, time.time() + 100))
    assert names(folder) == ["b", "a"]


def test_nxds_own_checkpoints_go_by_the_time_of_done(tmp_path: Path) -> None:
    folder = CheckpointFolder(open_storage(tmp_path))
    for age, name in ((1, "a"), (2, "b")):
        for file in (MARKER, DONE):
            folder.storage.write(f"{name}/{file}", [])
        os.utime(tmp_path / name / DONE, (time.time() - 1000 * age,) * 2)
    save(folder, "ours")
    assert names(folder) == ["ours", "a", "b"]
    assert folder.find("a").files is None and not folder.find("a").damage


@pytest.mark.parametrize("keep, left", [(1, ["e"]), (2, ["e", "d"]), (9, ["e", "d", "c"])])
def test_rotation_keeps_the_newest(folder: CheckpointFolder, keep: int, left: list[str]) -> None:
    folder.begin("interrupted")
    for name in ("c", "d", "e"):
        save(folder, name)
    folder.begin("under way")
    folder.storage.write("not a checkpoint/file", [b"x"])
    later = time.time() + 10
    if isinstance(folder.storage, LocalStorage):
        os.utime(Path(folder.storage.url) / "under way" / MARKER, (later, later))
    folder.rotate(keep)
    assert names(folder) == left
    if isinstance(folder.storage, LocalStorage):
        assert folder.storage.list() == sorted([*left, "not a checkpoint", "under way"])


def test_rotation_leaves_folders_that_are_no_checkpoints(folder: CheckpointFolder) -> None:
    """Even if they have a file `done`: ours and NxD's have a marker too."""
    folder.storage.write(f"mine/{DONE}", [b"all of it"])
    for name in ("a", "b"):
        save(folder, name)
    folder.rotate(1)
    assert folder.storage.read(f"mine/{DONE}") == b"all of it" and "a" not in names(folder)


FOREIGN = {
    "a user's folder": {"results/table.csv": b"1,2"},
    "a folder of TensorFlow's saver": {"results/checkpoint": b'model_checkpoint_path: "m"', "results/m.index": b"x"},
    "a checkpoint of NxD": {f"results/{MARKER}": b"1", "results/model/x.pt": b"x", f"results/{DONE}": b"1"},
    "a file": {"results": b"1,2"},
    "a folder with the name of a replaced checkpoint": {"results.previous/table.csv": b"1,2"},
}


@pytest.mark.parametrize("files", FOREIGN.values(), ids=FOREIGN)
def test_files_of_others_are_neither_replaced_nor_removed(folder: CheckpointFolder, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        folder.storage.write(name, [content])
    with pytest.raises(CheckpointError, match=r"results.* (is a file|is no checkpoint of neuronx_dist).*another tag"):
        folder.begin("results")
    folder.abandon("results")  # as a save does whose `begin` failed
    for name in ("a", "b"):
        save(folder, name)
    folder.clean("b", keep=1)
    folder.remove("results")
    assert {name: folder.storage.read(name) for name in files} == files
    assert "a" not in folder.storage.list() and folder.find("b")


def test_nothing_is_removed_through_a_link(tmp_path: Path) -> None:
    elsewhere = CheckpointFolder(open_storage(tmp_path / "elsewhere"))
    folder = CheckpointFolder(open_storage(tmp_path / "run"))
    save(elsewhere, "old")
    save(elsewhere, "started")
    os.remove(tmp_path / "elsewhere" / "started" / DONE)
    folder.storage.make_folder()
    for name in ("old", "started"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere" / name)
    for name in ("a", "b", "c"):
        save(folder, name)
    folder.rotate(1)
    assert folder.storage.list() == ["c", "old", "started"] and folder.damage(folder.find("old")) == []
    with pytest.raises(CheckpointError, match=r"run/old is a symbolic link: saving here would delete it"):
        folder.begin("old")
    folder.abandon("started")
    assert {name: len(elsewhere.storage.list(name)) for name in ("old", "started")} == {"old": 3, "started": 2}


def test_rotation_does_not_count_a_damaged_one(folder: CheckpointFolder) -> None:
    for name in ("a", "b", "c"):
        save(folder, name)
    folder.storage.write(f"c/{DONE}", [folder.storage.read(f"c/{DONE}").replace(b"x", b"y").replace(b"1", b"2", 1)])
    folder.rotate(1)
    assert "b" in names(folder) and "a" not in names(folder)


def test_a_tag_that_is_saved_again_is_there_until_it_is_replaced(folder: CheckpointFolder) -> None:
    save(folder, "a", b"x")
    folder.begin("a")
    folder.storage.write("a/file", [b"y"])
    assert folder.find("a").name == "a.previous" and folder.storage.read("a.previous/file") == b"x"
    folder.begin("a")  # the job was killed, and saves again
    folder.storage.write("a/file", [b"z"])
    assert folder.find("a").name == "a.previous" and names(folder) == ["a.previous"]
    folder.commit("a", {"file": Entry(1, CRC32_OF_X)})
    assert folder.find("a").name == "a"
    folder.clean("a")
    assert names(folder) == ["a"] and folder.storage.list() == ["a"] and folder.storage.read("a/file") == b"z"
    folder.begin("a")
    folder.abandon("a")
    assert names(folder) == ["a"] and folder.storage.read("a/file") == b"z"


class Killed(BaseException):
    pass


def killed_at_every_step(storage: Storage, run: Callable[[], Any]) -> list[Callable[[], None]]:
    """One function for each change that `run` makes in a storage: it runs until just before that change."""

    def until(step: int) -> None:
        count = 0
        originals = {name: getattr(storage, name) for name in ("write", "remove", "remove_tree", "rename")}

        def counted(name: str) -> Callable[..., Any]:
            def change(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == step:
                    raise Killed
                return originals[name](*args, **options)

            return change

        try:
            for name in originals:
                setattr(storage, name, counted(name))
            run()
            raise AssertionError("it has fewer steps")
        except Killed:
            pass
        finally:
            for name in originals:
                delattr(storage, name)

    return [lambda step=step: until(step) for step in range(1, 100)]


@pytest.mark.parametrize("name", ["new", "old", "older"])
def test_killed_before_any_change_a_whole_checkpoint_is_left(folder: CheckpointFolder, name: str) -> None:
    """Save, replacement and rotation are killed; afterwards the job continues as if nothing had happened."""

    def whole_save() -> None:
        save(folder, name)
        folder.rotate(1)

    steps = 0
    for until in killed_at_every_step(folder.storage, whole_save):
        folder.storage.remove_tree("")
        save(folder, "older")
        save(folder, "old")
        try:
            until()
        except AssertionError:
            break
        steps += 1
        assert any(folder.damage(tag) == [] for tag in folder.complete()), steps
        if name != "new":
            assert folder.damage(folder.find(name)) == [], steps
        save(folder, "next")
        folder.rotate(1)
        left = {entry: folder.storage.list(entry) for entry in folder.storage.list() if entry != "next"}
        assert names(folder) == ["next"] and not any(left.values()), (steps, left)
    assert steps >= 8


@pytest.mark.each_value
@pytest.mark.parametrize("for_good", [False, True])
@pytest.mark.parametrize("name", ["new", "old", "older"])
def test_whatever_change_fails_a_whole_checkpoint_is_left(folder: CheckpointFolder, name: str, for_good: bool) -> None:
    """Once, or from then on: an error is no reason to remove what is complete."""
    storage = folder.storage

    def attempt(fails_at: int) -> tuple[int, list[str]]:
        """A save in which change number `fails_at` fails: the number of changes, and warnings."""
        count = 0
        changes = ("write", "remove", "remove_tree", "rename", "sync")
        originals = {change: getattr(storage, change) for change in changes}

        def failing(change: str) -> Callable[..., Any]:
            def run(*args: Any, **options: Any) -> Any:
                nonlocal count
                count += 1
                if count == fails_at or for_good and count > fails_at:
                    raise PermissionError(13, "Permission denied")
                return originals[change](*args, **options)

            return run

        for change in changes:
            setattr(storage, change, failing(change))
        try:
            with warnings.catch_warnings(record=True) as caught, comm.as_rank(Mesh(1), 0):
                warnings.simplefilter("always", UserWarning)
                try:
                    folder.begin(name)
                except OSError:
                    folder.abandon(name)
                    return count, []
                entry = Entry(1, CRC32_OF_X)
                write = lambda storage, tag: storage.write(f"{tag}/file", [b"x"])  # noqa: E731
                save_ = Save(folder, name, write, {"file": entry}, 1, 0, 1)
                save_.write_own_files()
                try:
                    save_.settle()
                except CheckpointError:
                    pass
                else:
                    assert names(folder)[0] == name
        finally:
            for change in changes:
                delattr(storage, change)
        return count, [str(warning.message) for warning in caught]

    step, warned = 1, []
    while True:
        storage.remove_tree("")
        save(folder, "older")
        save(folder, "old")
        count, texts = attempt(step)
        if count < step:
            break
        warned += texts
        assert any(folder.damage(tag) == [] for tag in folder.complete()), step
        if name != "new":
            assert folder.damage(folder.find(name)) == [], step
        step += 1
    assert (
        step > 8 and all("is complete; older ones were not removed: [Errno 13]" in text for text in warned) and warned
    )


def test_damage_is_named(folder: CheckpointFolder) -> None:
    folder.begin("a")
    for file in ("one", "two", "b/three", "four"):
        folder.storage.write(f"a/{file}", [b"x"])
    folder.commit("a", {file: Entry(1, CRC32_OF_X) for file in ("one", "two", "b/three", "four")})
    tag = folder.find("a")
    assert folder.damage(tag) == []
    folder.storage.write("a/one", [b"y"])
    folder.storage.write("a/two", [b"xx"])
    folder.storage.remove("a/b/three")
    expected = {
        "one is damaged: its checksum is wrong",
        "two has 2 bytes instead of 1",
        "b/three is missing",
    }
    assert set(folder.damage(tag)) == expected
    shares = [folder.damage(tag, share, 3) for share in range(3)]
    assert sorted(sum(shares, [])) == sorted(expected) and max(map(len, shares)) == 2
    folder.storage.write(f"a/{MARKER}", [b"x"])
    assert "checkpoint is not what was written" in folder.damage(tag)
    with pytest.raises(CheckpointCorrupted, match="b/three is missing"):
        folder.read(tag, "b/three")


def test_every_flipped_bit_of_done_is_damage(folder: CheckpointFolder) -> None:
    save(folder, "a")
    content = folder.storage.read(f"a/{DONE}")
    for position in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[position // 8] ^= 1 << position % 8
        folder.storage.write(f"a/{DONE}", [flipped])
        assert folder.damage(folder.find("a")) == ["done is not what was written"], position


@pytest.mark.parametrize(
    "content",
    [
        5,
        {},
        {"saved": 1.0},
        {"saved": "x", "files": {}},
        {"saved": 1.0, "files": {"x": 5}},
        {"saved": 1.0, "files": {"x": ["1"]}},
    ],
)
def test_a_done_of_other_content_is_damage(folder: CheckpointFolder, content: Any) -> None:
    """With a checksum that fits."""
    save(folder, "a")
    text = json.dumps(content)
    folder.storage.write("a/done", [f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode()])
    assert folder.damage(folder.find("a")) == ["done lists files in another form than save_checkpoint does"]


def test_done_cannot_name_files_outside(folder: CheckpointFolder) -> None:
    for path in ("../b/file", "/etc/passwd", "x/../../y"):
        folder.begin("a")
        folder.commit("a", {path: Entry(1, 0)})
        assert "refers to files outside of its folder" in folder.damage(folder.find("a"))[0]


@pytest.mark.parametrize(
    "tag",
    ["", ".", "..", "a/b", "../a", "/a", "a\\b", "a\0", "a\n", ".hidden", "a.previous", "x" * 201, "s3://a", None, 1.5],
)
def test_tags_that_are_refused(tag: Any) -> None:
    with pytest.raises(ValueError, match="cannot name a checkpoint"):
        check_tag(tag)


def test_tags_that_are_not() -> None:
    assert [check_tag(tag) for tag in ("step_100", 7, "é x", "a..b")] == ["step_100", "7", "é x", "a..b"]

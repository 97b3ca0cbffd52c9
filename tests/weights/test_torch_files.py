"""Files of `torch.save`: tensors and plain data are read, all else is refused in one line with the file's name."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist.weights.torch_files import read_plain


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_what_torch_writes_is_read(zipped: bool, mmap: bool, tmp_path: Path) -> None:
    value = {"w": torch.arange(6.0).view(2, 3).t(), "step": 3, "names": ["a", None]}
    torch.save(value, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    content = (tmp_path / "file.pt").read_bytes()
    for read in (read_plain(tmp_path / "file.pt", mmap=mmap), read_plain(content), read_plain(memoryview(content))):
        assert torch.equal(read["w"], value["w"]) and (read["step"], read["names"]) == (3, ["a", None])


def _cut(path: Path) -> None:
    torch.save(torch.zeros(100), path)
    path.write_bytes(path.read_bytes()[:-200])


@pytest.mark.parametrize(
    "write, message",
    [
        (lambda path: path.write_bytes(b""), "is empty$"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "is a Git LFS pointer: fetch"),
        (
            lambda path: path.write_text("nonsense"),
            "is no file of torch.save, or is damaged: its 8 bytes begin with b'no",
        ),
        (
            lambda path: path.write_bytes(pickle.dumps([1])),
            "is a plain pickle, .* nothing was executed: save it by torch",
        ),
        (
            lambda path: torch.save(Harmful(), path),
            "holds more than tensors .* nothing was executed: it refers to .*mkdir$",
        ),
        (
            lambda path: path.write_bytes(pickle.dumps(Harmful(), 2)),
            "holds more than tensors and plain data; nothing was",
        ),
        (_cut, r"is truncated or damaged \(\d+ bytes, \w+ while it was read\): copy it again$"),
        (lambda path: path.mkdir(), "is a folder$"),
    ],
)
def test_what_is_refused(write: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.pt"
    write(path)
    with pytest.raises(ValueError, match=f"^{path} {message}") as error:
        read_plain(path)
    assert "\n" not in str(error.value) and not (tmp_path / "harm").exists()
    if path.is_file():
        with pytest.raises(ValueError, match=f"^run/file {message}"):
            read_plain(path.read_bytes(), "run/file")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "file.pt")

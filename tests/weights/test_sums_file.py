"""Checksums of a folder's files, in the text of sha256sum."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from neuronx_dist.weights.sums_file import SUMS, check_sums, write_sums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for name in ("a", "b c", "deep/d"):
        (tmp_path / name).write_text(name)
    write_sums(tmp_path, [tmp_path / name for name in ("deep/d", "b c", "a")])
    return tmp_path


def test_equal_files_pass_and_a_folder_without_sums_too(folder: Path) -> None:
    check_sums(folder)
    assert [line[66:] for line in (folder / SUMS).read_text().splitlines()] == ["a", "b c", "deep/d"]
    (folder / SUMS).unlink()
    (folder / "a").write_text("other")
    check_sums(folder)


def test_each_file_is_compared_by_one_of_several_ranks(folder: Path) -> None:
    for name, rank in (("a", 0), ("b c", 1), ("deep/d", 0)):
        before = (folder / name).read_text()
        (folder / name).write_text("other")
        check_sums(folder, 1 - rank, 2)
        with pytest.raises(ValueError, match=f"{name} differs from what was written: .* remove SHA256SUMS if"):
            check_sums(folder, rank, 2)
        (folder / name).write_text(before)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "SHA256SUMS is empty"),
        ("nonsense\n", "SHA256SUMS is damaged: it has the line 'nonsense'"),
        ("0" * 64 + "  ../a\n", r"names ../a, outside of its folder: do not trust"),
        ("0" * 64 + "  /etc/passwd\n", r"names /etc/passwd, outside of its folder"),
        ("0" * 64 + " *gone\n", "gone is missing: SHA256SUMS lists it"),
    ],
)
def test_sums_that_are_refused(text: str, message: str, folder: Path) -> None:
    (folder / SUMS).write_text(text)
    with pytest.raises(ValueError, match=message):
        check_sums(folder)


@pytest.mark.process
def test_sha256sum_reads_it(folder: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=folder, check=True, stdout=subprocess.DEVNULL)

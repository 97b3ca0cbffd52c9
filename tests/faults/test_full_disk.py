"""A disk that is full: 20 MB of memory as a file system, where this may be mounted, and a limit of a file's size."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from tests.checkpoint.small_run import Run, equal


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a small disk takes root and mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.process
@pytest.mark.parametrize("async_save", [False, True])
def test_what_was_there_is_intact_and_the_run_goes_on(small_disk: Path, async_save: bool) -> None:
    """The third of three checkpoints of 8 MB; when there is room again, it is saved."""

    def rank() -> None:
        run, undisturbed = Run(), Run()
        large = {"step": 0, "data": torch.zeros(1 << 21)}
        for tag in ("a", "b"):
            run.train()
            run.save(small_disk, tag, user_content={**large, "step": run.step}, async_save=async_save)
        # Which of the two meets the end of the disk depends on who writes first.
        with pytest.raises(nxd.CheckpointError, match="c could not be written: rank 0(, 1)?: OSError: .*No space left"):
            run.save(small_disk, "c", user_content=large, async_save=async_save)
            run.train()
            nxd.finalize_checkpoint()
        comm.barrier()
        assert sorted(os.listdir(small_disk)) == ["a", "b"]
        run.train(4 - run.step)
        undisturbed.train(4)
        assert equal(run.values(), undisturbed.values())
        for tag, step in (("a", 1), (None, 2)):
            assert Run().load(small_disk, tag)["step"] == step
        comm.barrier()
        if comm.rank("world") == 0:
            shutil.rmtree(small_disk / "a")
        comm.barrier()
        run.save(small_disk, "c", user_content={**large, "step": 4}, async_save=async_save)
        nxd.finalize_checkpoint()
        assert Run().load(small_disk)["step"] == 4

    threads.run(Mesh(2, tp=2), rank)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_file_that_may_not_grow_fails_the_save_alone(tmp_path: Path, async_save: bool) -> None:
    """RLIMIT_FSIZE, which needs no rights: a write writes less than it is asked to, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(soft: int) -> None:
        comm.barrier()
        if comm.rank("world") == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))
        comm.barrier()

    def rank() -> None:
        run = Run()
        run.train()
        run.save(tmp_path, "a", async_save=async_save)
        nxd.finalize_checkpoint()
        large = {"step": 2, "data": torch.zeros(1 << 20)}
        run.train()
        limit(1 << 20)
        try:
            with pytest.raises(nxd.CheckpointError, match="b could not be written: rank 0: OSError: .*File too large"):
                run.save(tmp_path, "b", user_content=large, async_save=async_save)
                nxd.finalize_checkpoint()
        finally:
            limit(before[0])
        assert sorted(os.listdir(tmp_path)) == ["a"] and Run().load(tmp_path)["step"] == 1
        run.save(tmp_path, "b", user_content=large, async_save=async_save)
        nxd.finalize_checkpoint()
        assert Run().load(tmp_path)["step"] == 2

    try:
        threads.run(Mesh(2, tp=2), rank)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

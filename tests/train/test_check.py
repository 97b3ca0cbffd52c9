"""`neuronx-dist train --check`, and the same check before every launch."""

from __future__ import annotations

import pytest

from tests.support import forked

pytest.importorskip("transformers")

pytestmark = pytest.mark.process

COMMAND = ["-m", "neuronx_dist", "train"]
SMALL = ["--steps", "1", "--global-batch", "4", "--seq-len", "32", "--microbatches", "2", "--tp", "2"]


def run(*flags: str, ranks: int = 1) -> tuple[int, str]:
    """Exit code and output of the command on so many ranks."""
    result = forked.run([*COMMAND, *flags], ranks)
    return max(result.codes), "".join(result.outputs + result.errors)


def test_check_alone_starts_nothing_and_knows_any_number_of_processes(tmp_path):
    out = tmp_path / "run"
    flags = ["--tp", "2", "--pp", "2", "--sequence-parallel", "--zero1", "--check", "16", "--global-batch", "32"]
    flags += ["--fused-loss"]
    code, text = run(*flags, "--out", str(out))
    assert code == 0, text
    first, *details = text.splitlines()
    assert first.startswith("check ok: 16 ranks, level G: gradients, collectives and pipeline messages agree")
    assert "programs on 16 ranks" in details[0] and not out.exists()


def test_sequences_that_are_divided_are_checked():
    code, text = run("--cp", "2", "--check")
    assert code == 0 and text.startswith("check ok: 2 ranks, level G"), text


def test_check_alone_refuses_what_cannot_be():
    code, text = run("--tp", "3", "--check")
    assert code == 2 and "cannot be split over tp 3" in text and "Traceback" not in text


def test_the_schedule_is_the_one_that_the_flags_ask_for():
    code, text = run("--pp", "2", "--schedule", "zb_v", "--check")
    assert code == 0 and "programs on 2 ranks" in text, text
    code, text = run("--pp", "4", "--virtual-pipeline-size", "2", "--check")
    assert code == 2 and "4 pipeline stages with 2 chunks each (Interleaved(" in text and "use pp 2" in text, text


def test_every_launch_is_checked_on_rank_0(tmp_path):
    code, text = run(*SMALL, "--out", str(tmp_path / "run"), ranks=2)
    assert code == 0, text
    assert text.count("check ok: ") == 1 and "step 1/1" in text


@pytest.mark.full  # tests/checking/programs have the limit itself
def test_the_check_gives_way(tmp_path):
    code, text = run(*SMALL, "--check-limit", "0", "--out", str(tmp_path / "run"), ranks=2)
    assert code == 0 and "step 1/1" in text, text
    assert "check ok" not in text
    assert "warning: not checked to the end in 0 s (--check-limit), going on" in text


def test_ranks_of_srun_and_mpirun_are_ranks_of_one_job():
    """Without a launcher's variables there is one process, which tp 3 does not divide."""
    for launcher in (
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
    ):
        result = forked.run([*COMMAND, "--tp", "3"], MASTER_ADDR="127.0.0.1", **launcher)
        assert result.codes == [2] and result.outputs[0].startswith("neuronx-dist train: 4 processes import torch"), (
            result
        )
        assert "4 processes are not divisible by tp 3" in result.errors[0]

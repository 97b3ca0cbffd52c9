"""A rank that stands still, in real processes: another names it and its line, and the hang timeout ends the job."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.test_killed import environment
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("hanging_job.py")


def line(text: str) -> str:
    """File and line number of `text` in the job."""
    number = next(n for n, code in enumerate(JOB.read_text().splitlines(), 1) if text in code)
    return rf"\S*hanging_job\.py:{number}"


LAST = line("# the last place")
STILL = rf"Rank {{}} stands still: its process has not run for [\d.]+ s \(.*\); its last place: {LAST}"
SILENT = rf"Rank 0 stands still: the job's store, .*, has not answered for [\d.]+ s \(.*\); its last place: {LAST}"
ELSEWHERE = "Rank 1 has not come there: for {seconds} s it has been at {line}"
WAITS = rf"gather_objects over tp \(ranks \[0, 1\], seen from rank {{}}\) at {line('# the others wait')}"


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, victim, words",
    [
        ("stop", 1, STILL.format(1)),
        ("stop", 0, SILENT),  # it has the job's store
        ("sleep", 1, ELSEWHERE.format(seconds=r"[\d.]+", line=line("# it sleeps"))),
        ("loop", 1, ELSEWHERE.format(seconds=r"[\d.]+", line=r"\S*hanging_job\.py:\d+")),
    ],
)
def test_the_rank_that_stands_still_is_named(tmp_path: Path, how: str, victim: int, words: str) -> None:
    limits = dict(NEURONX_DIST_DEBUG_WAIT="3", NEURONX_DIST_HANG_TIMEOUT="6", PATIENCE="0")
    result = forked.run([str(JOB), how, str(victim), str(tmp_path)], ranks=2, timeout=100, **limits)
    other = 1 - victim
    assert result.codes[other] == 124 and result.codes[victim] == (128 + 9 if how == "stop" else 124), result
    assert result.outputs == ["", ""] and result.errors[victim] == "", result
    waiting = rf"\[rank {other}\] has been waiting (for [\d.]+ s )?in {WAITS.format(other)}\. "
    assert re.fullmatch(rf"{waiting}{words}\n", result.errors[other]), result.errors[other]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_hang_timeout_names_the_rank_and_the_job_is_started_again(tmp_path: Path, victim: int) -> None:
    command = [sys.executable, "-m", "neuronx_dist", "run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "--hang-timeout", "6"]
    command += [str(JOB), "stop", str(victim), str(tmp_path)]
    patient = {**environment(), "PATIENCE": "30"}  # a loaded machine ends a job late
    done = subprocess.run(command, cwd=ROOT, env=patient, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    other = 1 - victim
    waits = rf"rank {other} (has been waiting for [\d.]+ s|waits) in {WAITS.format(other)}"
    words = rf"{STILL.format(1) if victim else SILENT}; {waits}, and the hang timeout is 6 s"
    # The stopped rank runs on for a moment before it is ended, and may see that the other one has ended.
    seen = rf"(\[rank {victim}\] RemoteRankError: rank {other} failed first: .*\n)?"
    assert re.fullmatch(rf"{seen}neuronx-dist run: {words}; restarting all ranks \(restart 1 of 1\)\n", done.stderr)
    assert done.stdout.count("ended well") == 2 and not (tmp_path / "was_left").exists()

"""Real processes, started for it: a rank that fails ends the job everywhere, and every rank says which and why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.process

JOB = Path(__file__).with_name("failing_job.py")
LIMIT = 20.0  # seconds from the failure to the end of all ranks
FIRST = "rank 1 failed first: ValueError: the parrot is dead"


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | dict(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", PYTHONPATH=path) | more


def line(text: str) -> str:
    """File and line number of `text` in the job."""
    number = next(n for n, code in enumerate(JOB.read_text().splitlines(), 1) if text in code)
    return f"failing_job.py:{number}"


def run(how: str, **more: str) -> tuple[list[str], list[int], float]:
    """Output and exit code of both ranks, and the seconds from the failure to the end of the last."""
    result = forked.run([str(JOB), how], ranks=2, timeout=60, **more)
    outputs = [output + error for output, error in zip(result.outputs, result.errors)]
    marks = [float(mark) for output in outputs for mark in re.findall(r"(?:failing|started) at ([\d.]+)", output)]
    assert marks, outputs
    return outputs, result.codes, result.ended - max(marks)


@pytest.mark.parametrize("how", ["collective", pytest.param("gather", marks=pytest.mark.full), "backward", "computing"])
def test_a_rank_that_raises_ends_all_ranks_and_each_shows_its_message(how):
    outputs, codes, seconds = run(how)
    assert all(codes), (codes, outputs)
    assert seconds < LIMIT, (seconds, outputs)
    assert "ValueError: the parrot is dead" in outputs[1]
    assert FIRST in outputs[0], outputs[0]
    if how in ("collective", "gather", "backward"):
        verb = "all_gather" if how == "gather" else "all_reduce"
        message = rf"RemoteRankError: {FIRST} \(met in {verb} of \[4\] float32 over tp .*failing_job.py:\d+\)"
        assert re.search(message, outputs[0]), outputs[0]
    else:
        assert "did not exit within" in outputs[0]


def test_a_rank_that_dies_without_a_word_ends_the_others_too():
    outputs, codes, seconds = run("killed")
    assert codes[1] == 9 and codes[0] != 0
    assert seconds < LIMIT, (seconds, outputs)
    message = (
        r"RemoteRankError: rank 1 failed first: lost without a message: it was killed .* \(met in all_reduce of \[4"
    )
    assert len(re.findall(message, outputs[0])) == 1 and len(outputs[0].splitlines()) == 2, outputs[0]


@pytest.mark.parametrize(
    "how, code, text, said",
    [
        ("exits", 3, "sys.exit(3)", r"ended by itself: sys.exit\(3\) at .*{line} "),
        ("returns", 0, "", "ended by itself: its script ended while others wait for it "),
        ("interrupted", 130, "os.kill(os.getpid(), signal.SIGINT)", r"interrupted \(Ctrl-C\) at .*{line} "),
    ],
)
def test_a_rank_that_ends_by_itself_is_named_with_its_line(how: str, code: int, text: str, said: str):
    outputs, codes, _ = run(how)
    assert codes[1] == code and codes[0] != 0
    said = said.format(line=line(text) if text else "")
    assert re.search(rf"RemoteRankError: rank 1 failed first: {said}\(met in all_reduce of \[4", outputs[0]), outputs[0]
    assert "Traceback" not in outputs[0] + outputs[1]
    lines = outputs[1].splitlines()[2:]
    assert len(lines) == (how == "interrupted"), lines


def test_equal_errors_of_all_ranks_are_one_traceback():
    outputs, codes, _ = run("all")
    assert codes == [1, 1]
    text = "".join(outputs)
    assert text.count("Traceback") == 1 and text.count("ValueError, as on rank") == 1, text


def test_labels_beyond_a_shard_of_the_vocabulary_name_the_loss_for_it():
    """torch's cross entropy takes the shard for all logits."""
    outputs, codes, _ = run("labels")
    assert codes == [1, 1]
    first, other = sorted(outputs, key=lambda output: "Traceback" not in output)
    hint = "If the logits are a shard of the vocabulary, .* their loss is parallel_cross_entropy"
    assert re.search(rf"IndexError: Target 7 is out of bounds\.\n\[rank .\] {hint}", first), first
    assert re.search("IndexError, as on rank .$", other, re.M), other  # torch may log below it that a store is gone


def test_a_silent_rank_is_a_timeout_that_names_verb_axis_and_call_site():
    outputs, codes, seconds = run("silent")
    assert codes[0] != 0
    message = rf"CommTimeout: all_gather of \[4\] float32 over tp .*{line('comm.all_gather(x')} timed out"
    assert re.search(message, outputs[0]), outputs[0]


def test_ranks_that_call_different_collectives_say_what_each_waits_for_before_they_give_up():
    outputs, codes, _ = run("different", NEURONX_DIST_DEBUG_WAIT="0.5")
    assert all(codes), (codes, outputs)
    for rank, what in enumerate([r"all_reduce of \[4\] float32", r"all_gather of \[2, 3\] int32"]):
        here = line('comm.all_reduce(x, "tp") if rank == 0')
        message = rf"\[rank {rank}\] has been waiting for [\d.]+ s in {what} over tp \(ranks \[0, 1\].*{here}\."
        assert len(re.findall(message, outputs[rank])) == 1, outputs[rank]  # once, in 2.5 s
        assert "NEURONX_DIST_DEBUG=collectives" in outputs[rank]


def test_different_shapes_are_an_error_of_that_collective_on_all_ranks():
    outputs, codes, seconds = run("shapes")
    assert codes == [1, 1] and seconds < LIMIT, (codes, seconds, outputs)
    here = line("comm.all_reduce(x if rank == 0")
    message = (
        rf"CommError: all_reduce of \[4\] float32 over tp \(ranks \[0, 1\], seen from rank 0\) at .*{here}: received"
    )
    assert re.search(rf"\[rank 0\] {message}", outputs[0]), outputs[0]
    assert re.search(rf"rank 0 failed first: {message}.*NEURONX_DIST_DEBUG=collectives", outputs[1]), outputs[1]
    assert "terminate called" not in outputs[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize(
    "destroyed", ["", *(pytest.param(part, marks=pytest.mark.full) for part in ("groups", "mesh")), "mesh groups"]
)
def test_no_thread_of_gloo_is_left_at_the_end_whatever_the_script_has_destroyed(destroyed):
    """A thread that comes back to Python later aborts the process."""
    command = [sys.executable, str(JOB.with_name("ending_job.py")), *destroyed.split()]
    job = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert (job.returncode, job.stdout) == (0, "in the job True\nat the end False\n"), job.stderr


def test_under_torchrun_every_rank_shows_the_first_failure():
    """torchrun ends the other ranks as soon as one has failed: they have said why by then."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    job = subprocess.Popen(
        [*command, "--nproc-per-node", "2", "--tee", "3", str(JOB), "computing"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = job.communicate(timeout=60)[0]
        ended = time.time()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)  # a session of its own: the launcher and its two ranks
            job.wait()
    assert job.returncode != 0
    failing = float(re.findall(r"failing at ([\d.]+)", output)[0])
    assert ended - failing < LIMIT, output
    assert f"[rank 0] {FIRST}" in output, output
    assert "ValueError: the parrot is dead" in output

"""Starts and ends of the training example under `neuronx-dist run`: one line where a job is refused or interrupted."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.examples.test_train_llama import SCRIPT, SMALL, command
from tests.support.paths import ROOT

pytest.importorskip("transformers")

pytestmark = pytest.mark.process


@pytest.fixture
def started():
    """Starts the example on two processes; its output comes line by line."""
    processes = []

    def start(*flags, launch=()):
        words, env = command([*launch, str(SCRIPT), *SMALL, *flags], processes=2, launcher=("neuronx_dist", "run"))
        process = subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.stdout.close()
        process.wait()


def test_a_refusal_is_the_only_thing_seen(started, tmp_path):
    """Also where a job is started again: it would be refused again."""
    process = started("--tp", "3", "--out", str(tmp_path / "run"), launch=["--max-restarts", "2"])
    text, _ = process.communicate(timeout=240)
    first, refusal, *reasons = text.splitlines()
    assert first == "train_llama: 2 processes import torch and transformers ..."
    assert refusal.startswith("train_llama: this layout cannot work")
    assert reasons and all(line.startswith("  - ") for line in reasons), text
    assert process.returncode == 2


def test_ctrl_c_ends_with_one_line(started, tmp_path):
    out = tmp_path / "run"
    process = started("--tp", "2", "--steps", "5000", "--no-check", "--out", str(out))
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("step") and " 3/5000 " in line:
            break
    else:
        pytest.fail(f"the run ended by itself, with {process.wait(timeout=60)}: {''.join(seen)}")
    process.send_signal(signal.SIGINT)  # to the launcher alone, as its processes have sessions of their own
    *steps, last = process.stdout.read().splitlines()
    assert all(line.startswith(("step ", "held-out loss", "ending after this step")) for line in steps), steps
    assert last.startswith("train_llama: interrupted after step ")
    assert last.endswith(f" and saved; go on with --resume --out {out}")
    assert process.wait(timeout=60) == 130
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) >= 3 and f"after step {len(rows)} of 5000" in last
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step_{len(rows)}"]
    assert (out / "loss.png").exists() and (out / "run.json").exists() and not (out / "model").exists()


@pytest.mark.parametrize("number, verb", [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_second_signal_ends_at_once_but_not_what_repeats_the_first(number, verb):
    script = f"""
import os, time, job
job.AGAIN = 0.2
job.end_after_step(lambda: "in the middle")
print(job.asked_to_end())
os.kill(os.getpid(), {number}), os.kill(os.getpid(), {number})
print(job.asked_to_end(), flush=True)
time.sleep(0.5)
os.kill(os.getpid(), {number})
print("still there")
"""
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    hint = ["ending after this step with a checkpoint; Ctrl-C again ends at once"] * (number == signal.SIGINT)
    assert done.stdout.splitlines() == ["0", str(int(number)), *hint]
    assert (done.stderr, done.returncode) == (f"train_llama: {verb} in the middle\n", 128 + number)


@pytest.mark.parametrize(
    "variable,rank,seen",
    [
        ("RANK", "0", "train_llama: why\n"),
        ("RANK", "3", "train_llama, rank 3: why\n"),
        ("SLURM_PROCID", "1", "train_llama, rank 1: why\n"),
    ],
)
def test_who_leaves_alone_says_why(variable, rank, seen):
    """A rank that alone sees an error, such as a missing folder of its host, says so: no other rank knows it."""
    script = "import job; job.WAIT = 0.1; job.leave('why', 3)"
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), variable: rank}
    done = subprocess.run([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.stderr, done.returncode) == (seen, 3)


@pytest.mark.parametrize(
    "target,words",
    [
        ("setup", ["4 steps, some minutes", "1 of 4: torch==", "2 of 4", "3 of 4", "4 of 4", "done"]),
        ("train", ["train: 6 processes start (tp 3, pp 2)", "neuronx_dist run"]),
    ],
)
def test_make_says_what_it_does_before_it_does_it(target, words):
    make = ["make", "--dry-run", "--always-make", "--no-print-directory", target, "TP=3", "PP=2"]
    done = subprocess.run(make, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    places = [done.stdout.find(word) for word in words]
    assert done.returncode == 0 and -1 not in places and places == sorted(places), done.stdout


def test_other_scripts_are_left_alone(tmp_path):
    """Importing the module changes nothing but for the example itself."""
    script = "from signal import SIGINT, getsignal as get; old = get(SIGINT); import job; print(get(SIGINT) == old)"
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "True\n"

"""Starts and ends of the training example under `neuronx-dist run`: one line where a job is refused or interrupted."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.support import forked
from tests.support.paths import EXAMPLES, ROOT
from tests.train.test_training_run import SMALL

pytest.importorskip("transformers")

pytestmark = pytest.mark.process


def command(words, processes=1, launcher=("torch.distributed.run",), **environment):
    """A Python command, on so many processes of a launcher; (words, environment)."""
    python = [sys.executable]
    if processes > 1:
        python += ["-m", *launcher, "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(processes)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", **environment}
    env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    return [*python, *words], env


@pytest.fixture
def started():
    """Starts a command; its output comes line by line."""
    processes = []

    def start(words, ranks=1, launcher=()):
        words, env = command([*words, *SMALL, "--steps", "5000"], ranks, launcher)
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
    words = ["--max-restarts", "2", str(EXAMPLES / "train_llama.py"), "--tp", "3", "--out", str(tmp_path / "run")]
    process = started(words, ranks=2, launcher=("neuronx_dist", "run"))
    text, _ = process.communicate(timeout=240)
    first, refusal, *reasons, nearest = text.splitlines()
    assert first == "neuronx-dist train: 2 processes import torch and transformers ..."
    assert refusal.startswith("neuronx-dist train: this layout cannot work")
    assert reasons and all(line.startswith("  - ") for line in reasons), text
    assert nearest.strip() == "the nearest layout that works: --tp 2"
    assert process.returncode == 2


def test_ctrl_c_ends_with_one_line(started, tmp_path):
    """The ranks are those that the command itself has started."""
    out = tmp_path / "run"
    process = started(["-m", "neuronx_dist", "train", "--tp", "2", "--no-check", "--out", str(out)])
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
    assert last.startswith("neuronx-dist train: interrupted after step ")
    assert last.endswith(f" and saved; go on with --resume --out {out}")
    assert process.wait(timeout=60) == 130
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) >= 3 and f"after step {len(rows)} of 5000" in last
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step_{len(rows)}"]
    assert (out / "loss.png").exists() and (out / "run.json").exists() and not (out / "model").exists()


@pytest.mark.parametrize("number, verb", [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "ended by SIGTERM")])
def test_a_second_signal_ends_at_once_but_not_what_repeats_the_first(number, verb):
    script = f"""
import os, time
from neuronx_dist.train import rank_exit as job
job.AGAIN = 0.2
job.end_after_step(lambda: "in the middle")
print(job.asked_to_end())
os.kill(os.getpid(), {number}), os.kill(os.getpid(), {number})
print(job.asked_to_end(), flush=True)
time.sleep(0.5)
os.kill(os.getpid(), {number})
print("still there")
"""
    done = forked.run(["-c", script])
    hint = ["ending after this step with a checkpoint; Ctrl-C again ends at once"] * (number == signal.SIGINT)
    assert done.outputs[0].splitlines() == ["0", str(int(number)), *hint]
    assert (done.errors, done.codes) == ([f"neuronx-dist train: {verb} in the middle\n"], [128 + number])


@pytest.mark.parametrize(
    "variable,rank,seen",
    [
        ("RANK", "0", "neuronx-dist train: why\n"),
        ("RANK", "3", "neuronx-dist train, rank 3: why\n"),
        ("SLURM_PROCID", "1", "neuronx-dist train, rank 1: why\n"),
    ],
)
def test_who_leaves_alone_says_why(variable, rank, seen):
    """A rank that alone sees an error, such as a missing folder of its host, says so: no other rank knows it."""
    script = "from neuronx_dist.train import rank_exit as job; job.WAIT = 0.1; job.leave('why', 3)"
    done = forked.run(["-c", script], **{variable: rank})
    assert (done.errors, done.codes) == ([seen], [3])


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

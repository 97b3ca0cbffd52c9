"""A job on two hosts: it trains and saves, the ranks of one host are killed, it is started again and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.test_killed import results
from tests.faults.two_hosts import Host, NoHosts, children, linked_hosts
from tests.support.paths import EXAMPLES, ROOT
from tests.train.test_resume import model_config

pytestmark = pytest.mark.process

JOB = ["--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    try:
        with linked_hosts() as both:
            yield both
    except NoHosts as error:
        pytest.skip(str(error))


def launched(hosts: list[Host], words: list[str], folder: Path, launcher: str) -> list[subprocess.Popen[bytes]]:
    """The same command on both hosts; torchrun is told what `neuronx-dist run` finds out."""
    endpoint = ["--rdzv-endpoint", f"{hosts[0].address}:29511"]
    started = []
    for number, host in enumerate(hosts):
        output = folder / f"host_{number}.txt"
        if launcher == "neuronx-dist run":
            started.append(host.start(["-m", "neuronx_dist", "run", *JOB, *endpoint, *words], output))
        else:
            options = ["--local-addr", host.address, "--rdzv-conf", f"is_host={int(number == 0)}"]
            network = {"GLOO_SOCKET_IFNAME": host.interface, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            command = ["-m", "torch.distributed.run", *JOB, *endpoint, *options, *words]
            started.append(host.start(command, output, **network))
    return started


def end_of(
    started: list[subprocess.Popen[bytes]], folder: Path, seconds: float, meanwhile: Callable[[], None] = lambda: None
) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of both hosts."""
    try:
        meanwhile()
        deadline = time.monotonic() + seconds
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
    finally:
        for process in started:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    return codes, [(folder / f"host_{number}.txt").read_text() for number in range(len(started))]


@pytest.mark.slow
def test_the_ranks_of_one_host_are_killed(hosts: list[Host], tmp_path: Path) -> None:
    """The weights and the optimizer's state are those of a run on one host that nobody disturbs."""
    words = ["-m", "tests.faults.launched_run", str(tmp_path), "2,3", "write", "30"]
    started = launched(hosts, words, tmp_path, "neuronx-dist run")
    (tmp_path / "alone").mkdir()
    (undisturbed,) = results(tmp_path / "alone", "tp 2, dp 2, ZeRO-1", [[]], timeout=120)
    codes, texts = end_of(started, tmp_path, 120)
    assert codes == [0, 0], texts
    assert texts[1].count("was ended by SIGKILL; restarting all ranks (restart 1 of 1)") == 1, texts[1]
    assert (tmp_path / "killed").exists() and "Traceback" not in texts[0] + texts[1], texts
    assert [(tmp_path / f"digest_{rank}").read_text() for rank in range(4)] == undisturbed["digests"]


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["neuronx-dist run", "torchrun"])
def test_the_training_example(hosts: list[Host], tmp_path: Path, launcher: str) -> None:
    pytest.importorskip("transformers")
    model_config(32).save_pretrained(tmp_path / "model")
    small = "--steps 60 --global-batch 4 --seq-len 32 --microbatches 2 --log-every 1 --save-every 5 --no-check"
    files = ["--model", str(tmp_path / "model"), "--data", str(ROOT / "LICENSE")]
    flags = [*small.split(), "--tp", "2", "--zero1", *files]
    script = str(EXAMPLES / "train_llama.py")

    def train(out: str, disturb: Callable[[list[subprocess.Popen[bytes]]], None]) -> list[str]:
        started = launched(hosts, [script, *flags, "--out", str(tmp_path / out)], tmp_path, launcher)
        codes, texts = end_of(started, tmp_path, 150, lambda: disturb(started))
        assert codes == [0, 0], texts
        return texts

    def kill(started: list[subprocess.Popen[bytes]]) -> None:
        output = tmp_path / "host_0.txt"
        while "step 12/60" not in output.read_text():
            assert all(process.poll() is None for process in started), output.read_text()
            time.sleep(0.02)
        for rank in children(started[1]):
            os.kill(rank, signal.SIGKILL)

    train("whole", lambda started: None)
    texts = train("killed", kill)
    assert texts[0].count("resumed after step ") == 1, texts[0]
    assert texts[0].count("neuronx-dist train: ended ") == 1 and "failed first: lost without a message" in texts[0], (
        texts[0]
    )
    if launcher == "neuronx-dist run":
        assert "Traceback" not in texts[0] + texts[1], texts
    weights = [(tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("whole", "killed")]
    assert weights[0] == weights[1]
    record = json.loads((tmp_path / "killed" / "run.json").read_text())
    assert len(record["launches"]) == 2 and len(record["resumed"]) == 1

"""`neuronx-dist train` on one XLA device of the CPU: the CPU's losses, and nothing compiled after the start."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.paths import ROOT
from tests.xla.compare import assert_close

STEPS = 20
OPTIONS = ("--zero1", "--steps", str(STEPS), "--warmup", "5", "--microbatches", "2", "--global-batch", "8")


def run(*options: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "neuronx_dist", "train", "--seq-len", "64", *options],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": "1",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles in half the time
            "PT_XLA_DEBUG_LEVEL": "1",  # says when a program is compiled
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def train(device: str, data: Path, out: Path) -> tuple[list[dict[str, float]], str]:
    log = run(*OPTIONS, "--device", device, "--data", str(data), "--out", str(out), "--log-every", "1")
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row], log


@pytest.mark.timeout(600)
def test_losses_are_those_of_the_cpu(tmp_path):
    data = tmp_path / "text"  # one that does not change: a batch can be so steep that fp32 has four digits of its norm
    data.mkdir()
    shutil.copy(ROOT / "LICENSE", data / "license.md")
    ours, log = train("xla", data, tmp_path / "xla")
    theirs, _ = train("cpu", data, tmp_path / "cpu")
    assert len(ours) == len(theirs) == STEPS
    for mine, other in zip(ours, theirs):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    # The first step makes the optimizer's state, the second is the one that stays; step 4 evaluates for the first time.
    between = log[log.index("step  5/20") : log.index("step 20/20")]
    assert "Compilation Cause" in log and "Compilation Cause" not in between
    saved = [load_file(tmp_path / device / "model" / "model.safetensors") for device in ("xla", "cpu")]
    assert_close(*saved, tolerance=1e-4)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "xla" / "model").config.hidden_size == 192


def test_verify_compares_the_device_with_the_cpu(tmp_path):
    data = shutil.copytree(ROOT / "docs", tmp_path / "docs")
    small = ("--steps", "2", "--global-batch", "2", "--microbatches", "1")
    text = run("--device", "xla", "--verify", *small, "--data", str(data))
    assert "one process" in text and "tp 1 × pp 1 × dp 1" in text and "these losses on xla agree to 1e-05" in text

"""Ranks killed at any point: started again by hand, the run ends with the very bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killed_runs import KEPT, POINTS
from tests.support.paths import ROOT


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def results(folder: Path, ranks: int, scenarios: list[Any], timeout: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.faults.killed_runs", str(folder), str(ranks), json.dumps(scenarios)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(folder: Path, ranks: int, scenarios: list[Any], timeout: float) -> None:
    undisturbed, *others = results(folder, ranks, [[], *scenarios], timeout)
    assert not undisturbed["killed"] and len(undisturbed["left"]) == KEPT
    for scenario, result in zip(scenarios, others, strict=True):
        assert result["killed"], f"{scenario} does not come"
        assert result["digests"] == undisturbed["digests"], scenario
        assert result["end"] == undisturbed["end"], scenario
        rank, point, occurrence = scenario
        if point in ("copy", "remove", "replace") and occurrence > 2:  # a save was complete before
            assert result["left"], scenario


@pytest.mark.slow
def test_killed_at_the_corners(tmp_path: Path) -> None:
    """In the copy of a save, while files are written, synced, named, and while an older one is removed."""
    scenarios = [
        [1, "copy", 3],
        [0, "write", 20],
        [1, "sync", 7],
        [0, "rename", 13],
        [0, "remove", 8],
        [0, "replace", 1],
    ]
    check(tmp_path, 2, scenarios, timeout=280)


@pytest.mark.full
@pytest.mark.timeout(500)
def test_killed_anywhere(tmp_path: Path) -> None:
    """Four ranks, 40 points at random."""
    chance = random.Random(0)
    most = {
        "copy": 6,
        "load": 1,
        "replace": 3,
        "backward": 8,
        "step": 8,
        "remove": 8,
        "sync": 30,
        "rename": 20,
        "write": 60,
    }
    scenarios = []
    for number in range(40):
        point = [point for point in POINTS if point != "load"][number % (len(POINTS) - 1)]
        rank = 0 if point in ("remove", "replace") else chance.randrange(4)
        scenarios.append([rank, point, chance.randint(1, most[point])])
    check(tmp_path, 4, scenarios, timeout=480)


@pytest.mark.slow
def test_it_is_started_again(tmp_path: Path) -> None:
    """`neuronx-dist run --max-restarts`: nothing else is needed to resume."""
    (undisturbed,) = results(tmp_path, 2, [[]], timeout=120)
    command = [sys.executable, "-m", "neuronx_dist", "run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "tests.faults.launched_run"]
    command += [str(tmp_path), "1", "write", "30"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert [(tmp_path / f"digest_{rank}").read_text() for rank in (0, 1)] == undisturbed["digests"]

"""Ranks killed at any point: started again by hand, the run ends with the very bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.killed_runs import KEPT, LAYOUTS, POINTS
from tests.faults.two_hosts import children
from tests.support.paths import ROOT


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def results(folder: Path, layout: str, scenarios: list[Any], timeout: float) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.faults.killed_runs", str(folder), layout, json.dumps(scenarios)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(folder: Path, layout: str, scenarios: list[Any], timeout: float) -> None:
    undisturbed, *others = results(folder, layout, [[], *scenarios], timeout)
    assert not undisturbed["killed"] and len(undisturbed["left"]) == KEPT
    for scenario, result in zip(scenarios, others, strict=True):
        assert result["killed"], f"{scenario} does not come"
        assert result["digests"] == undisturbed["digests"], scenario
        assert result["end"] == undisturbed["end"], scenario
        _, point, occurrence, *_ = scenario
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
    check(tmp_path, "tp 2", scenarios, timeout=280)


MOST = {  # occurrences of each point in a run of every layout; other ranks than 0 write less
    "copy": 6,
    "replace": 3,
    "backward": 8,
    "step": 8,
    "remove": 8,
    "sync": 20,
    "rename": 13,
    "write": 20,
}


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_random_points(tmp_path: Path, layout: str) -> None:
    """Three points in each layout, with NXD_FULL=1 twenty; one in three by SIGTERM. The seed is the layout's name."""
    chance, ranks = random.Random(layout), LAYOUTS[layout][0]
    points = [point for point in POINTS if point in MOST]
    chance.shuffle(points)
    scenarios: list[Any] = []
    for number in range(20 if os.environ.get("NXD_FULL") == "1" else 3):
        point = points[number % len(points)]
        rank = 0 if point in ("remove", "replace") else chance.randrange(ranks)
        scenarios.append([rank, point, chance.randint(1, MOST[point]), *["SIGTERM"] * (number % 3 == 1)])
    check(tmp_path, layout, scenarios, timeout=480)


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


@pytest.mark.slow
def test_the_launcher_gets_sigterm(tmp_path: Path) -> None:
    """Sends what a scheduler sends: no rank is left, not even a stopped one, and the next launch resumes."""
    (undisturbed,) = results(tmp_path, "tp 2", [[]], timeout=120)
    command = [sys.executable, "-m", "neuronx_dist", "run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "-m", "tests.faults.launched_run", str(tmp_path)]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    job = subprocess.Popen([*command, "1", "backward", "5", "SIGSTOP"], cwd=ROOT, env=environment(), **pipes)
    try:
        while not any(map(is_stopped, ranks := children(job))):
            assert job.poll() is None, job.communicate()
            time.sleep(0.05)
        job.terminate()
        out, err = job.communicate(timeout=100)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGTERM and out == "" and "Traceback" not in err, err
    assert len(ranks) == 2 and not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    done = subprocess.run([*command, "-1", "backward", "0"], cwd=ROOT, env=environment(), timeout=200, **pipes)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"digest_{rank}").read_text() for rank in (0, 1)] == undisturbed["digests"]


@pytest.mark.slow
def test_it_is_started_again(tmp_path: Path) -> None:
    """`neuronx-dist run --max-restarts`: nothing else is needed to resume."""
    (undisturbed,) = results(tmp_path, "tp 2", [[]], timeout=120)
    command = [sys.executable, "-m", "neuronx_dist", "run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", "-m", "tests.faults.launched_run"]
    command += [str(tmp_path), "1", "write", "30"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "killed").exists()
    assert [(tmp_path / f"digest_{rank}").read_text() for rank in (0, 1)] == undisturbed["digests"]

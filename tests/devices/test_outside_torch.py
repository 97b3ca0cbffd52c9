"""Training on a device outside torch (PrivateUse1), in two processes, equals training on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from tests.devices import outside_torch_job
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch registers no device type in Python",
)


def run(device: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "neuronx_dist", "run", "--standalone", "--local-addr", "127.0.0.1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_FR_BUFFER_SIZE"] = "0"  # the flight recorder of torch 2.15 asks such a group for its name
    job = [outside_torch_job.__file__, device, str(folder)]
    return subprocess.run(
        [*words, "--nproc-per-node", "2", *job], env=environment, capture_output=True, text=True, timeout=200
    )


def report_of(device: str, folder: Path) -> dict[str, Any]:
    done = run(device, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.process
def test_training_equals_training_on_the_cpu(tmp_path: Path) -> None:
    """TP, ZeRO-1, recomputed dropout, a checkpoint, a ShardTensor, `parallelize`, a pipeline (1F1B), Muon, fused loss.

    Autograd has a thread for this device, as for a GPU: ranks that are threads must not wait for each other in it.
    """
    cpu, imitated = (report_of(device, tmp_path / device) for device in ("cpu", "imitated"))
    assert imitated["device"] == imitated["local"] == "imitated:0" and cpu["local"] == "cpu"
    *figures, states = imitated["figures"]
    *expected, cpu_states = cpu["figures"]
    assert figures[0::2] == pytest.approx(expected[0::2], rel=1e-12)  # losses, the restored numbers
    assert figures[1::2] == pytest.approx(expected[1::2], rel=1e-6)  # norms: float32 where float64 may be missing
    assert figures[2:4] == figures[4:6] and figures[6:] == [1.0, 24.0]  # a step, and the same after loading
    assert (states, cpu_states) == (2, 1)
    assert len(cpu["norms"]) == 2 and imitated["norms"] == pytest.approx(cpu["norms"], rel=1e-5)
    assert imitated["threads"] == cpu["threads"] == [12.0, 24.0]  # 2 ranks x 2x, three elements each
    assert len(cpu["divided"]) == 2 and imitated["divided"] == pytest.approx(cpu["divided"], rel=1e-12)
    assert cpu["muon"][-1] < 0.8 * cpu["muon"][0] and imitated["muon"] == pytest.approx(cpu["muon"], rel=1e-6)
    # The background thread copies on a stream of its own, after the computation of what it copies.
    calls = imitated["calls"]
    assert calls[calls.index("Event") :][:4] == ["Event", "Event.record", "Stream.wait_event", "stream"]
    assert "Stream.synchronize" in calls


@pytest.mark.process
def test_two_processes_on_one_device_are_refused(tmp_path: Path) -> None:
    done = run("imitated", tmp_path / "shares")
    assert done.returncode == 1
    assert "both use imitated:0, which takes one process: start them with torchrun" in done.stderr

"""A job in which a rank stands still, in torchrun's environment: `hanging_job.py HOW RANK FOLDER` (test_hangs.py)."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import neuronx_dist as nxd
from neuronx_dist import comm

MOST = 60.0  # seconds until a stopped rank is killed in any case
PATIENCE = float(os.environ.get("PATIENCE", "10"))  # seconds until it is, after all others have ended


def start_killer(others: list[int], folder: Path) -> None:
    """Starts a child that kills this process after the others have ended, so that nothing is left of a test."""
    pid, begin = os.getpid(), time.monotonic()
    if os.fork() == 0:
        while any(map(is_running, others)) and time.monotonic() < begin + MOST:
            time.sleep(0.1)
        end = time.monotonic() + PATIENCE
        while is_running(pid) and time.monotonic() < end:
            time.sleep(0.1)
        if is_running(pid):
            (folder / "was_left").touch()
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main(how: str, victim: int, folder: Path) -> None:
    nxd.init_distributed("cpu", timeout=120)
    nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    for _ in range(8):
        comm.all_reduce(torch.ones(4), "tp")
        time.sleep(0.15)
    pids = comm.gather_objects(os.getpid(), "tp")
    if comm.rank("tp") == victim and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        if how == "stop":
            start_killer([pid for pid in pids if pid != os.getpid()], folder)
        time.sleep(1.2)  # the last place of a stopped rank
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "sleep":
            time.sleep(60)  # it sleeps
        while how == "loop":
            pass  # it computes
    comm.gather_objects("here", "tp")  # the others wait
    print("ended well", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))

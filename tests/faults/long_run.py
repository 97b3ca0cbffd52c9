"""A run of many steps that prints what it holds: `long_run.py STEPS FOLDER` on every rank (test_long_run.py).

Rank 0 prints a line of JSON: memory in bytes, descriptors and threads of each rank, at a quarter of the run and at its
end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from pathlib import Path

import neuronx_dist as nxd
from neuronx_dist import comm
from tests.checkpoint.small_run import Run

EVERY = 25  # steps between two checkpoints
WIDTH = 1024  # of the hidden layer: each of its two weights has 32 kB


def held() -> list[int]:
    """Resident bytes that are not of files, open descriptors, threads of the process, threads of Python."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(status["RssAnon"].split()[0]) * 1024
    return [memory, len(os.listdir("/proc/self/fd")), int(status["Threads"]), threading.active_count()]


def main(steps: int, folder: Path) -> None:
    nxd.init_distributed("cpu", timeout=120)
    nxd.initialize_model_parallel(tensor_model_parallel_size=1)
    nxd.model_parallel_manual_seed(0)
    run = Run(width=WIDTH, dropout=0.1)
    seen = []
    while run.step < steps:
        run.train()
        if run.step % EVERY == 0:
            run.save(folder, f"step_{run.step}", num_kept_ckpts=2, async_save=run.step % (2 * EVERY) == 0)
        if run.step in (steps // 4, steps):
            nxd.finalize_checkpoint()
            seen.append(comm.gather_objects(held(), "world"))
    if comm.rank("world") == 0:
        print(json.dumps(seen), flush=True)
    comm.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

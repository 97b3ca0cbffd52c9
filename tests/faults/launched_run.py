"""A rank of a run: some of them are killed, once, and torchrun starts all of them again.

neuronx-dist run ... -m tests.faults.launched_run FOLDER RANK[,RANK] POINT OCCURRENCE [SIGNAL]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import neuronx_dist as nxd
from neuronx_dist import comm
from tests.faults.killed_runs import train


def main(root: Path, victims: list[int], point: str, occurrence: int, sent: str = "SIGKILL") -> None:
    nxd.init_distributed()
    nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    rank = comm.rank("world")
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not is_first:
        (root / "killed").touch()
    digest = train(root / "run", point if is_first and rank in victims else None, occurrence, signal.Signals[sent])
    (root / f"digest_{rank}").write_text(digest)
    comm.barrier()


if __name__ == "__main__":
    main(
        Path(sys.argv[1]), [int(rank) for rank in sys.argv[2].split(",")], sys.argv[3], int(sys.argv[4]), *sys.argv[5:]
    )

"""What a training step costs in XLA programs: how many are compiled, how large they are, how often the host waits.

    .venv-xla/bin/python benchmarks/xla_graphs.py

Steps of a two-layer Llama are lowered on four ranks and executed on virtual CPU devices; times are none of a device's.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "xla"))

import training_programs as programs
from training_programs import Training

from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import replay_loop

CASES = {
    "tp2 dp2, AdamW": (Mesh(4, tp=2), Training("adamw", "plain")),
    "tp2 dp2, ZeRO-1": (Mesh(4, tp=2), Training("adamw", "zero1")),
    "tp2 dp2, ZeRO-1, sequence parallel": (Mesh(4, tp=2), Training("adamw", "zero1", sequence_parallel=True)),
    "tp2 dp2, ZeRO-1, 4 microbatches": (Mesh(4, tp=2), Training("adamw", "zero1", microbatches=4)),
    "tp4, ZeRO-1": (Mesh(4, tp=4), Training("adamw", "zero1")),
}
SCHEDULE = [0.0, 5e-4, 1e-3, 5e-4, 0.0]  # 0 is a constant of a program, unless it is a tensor on the device


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(f"torch {torch.__version__}; {len(SCHEDULE)} steps with learning rates {SCHEDULE}\n")
    print("| case | programs compiled, by step | host reads, by step | instructions | collectives | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, (mesh, case) in CASES.items():
        start = time.perf_counter()
        batches = [
            [(*programs.rows_of(mesh.dp, rank // mesh.tp, k), torch.tensor(lr)) for k, lr in enumerate(SCHEDULE)]
            for rank in range(mesh.world_size)
        ]
        arguments = [(case, torch.zeros(1), torch.tensor(0.0))] * mesh.world_size
        found = replay_loop(programs.setup, mesh, arguments, batches)
        new = [int(index not in found.program_of_step[:k]) for k, index in enumerate(found.program_of_step)]
        last = found.programs[-1]
        kinds = ", ".join(f"{count} {kind} {axis}" for (kind, axis), count in sorted(last.counts().items()))
        seconds = time.perf_counter() - start
        print(f"| {name} | {new} | {found.host_reads} | {len(last.lines)} | {kinds} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""XLA programs of a training step: numbers of compilations, runs, and synchronisations of host and device.

    .venv-xla/bin/python -m benchmarks.xla_graphs

Steps of a two-layer Llama are lowered on four ranks and executed on virtual CPU devices; times are none of a device's.
The learning rate warms up from 0 and decays to 0. Of each step: programs that no step before had (they are compiled),
programs that rank 0 runs, tensors that it brings to the device, values that it waits for to read.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import torch

from neuronx_dist.mesh import Mesh
from tests.xla.programs import training as programs
from tests.xla.programs.training import SCHEDULE, Training

CASES = {
    "tp2 dp2, AdamW": (Mesh(4, tp=2), Training("adamw", "plain")),
    "tp2 dp2, ZeRO-1": (Mesh(4, tp=2), Training("adamw", "zero1")),
    "tp2 dp2, ZeRO-1, sequence parallel": (Mesh(4, tp=2), Training("adamw", "zero1", sequence_parallel=True)),
    "tp2 dp2, ZeRO-1, 4 microbatches": (Mesh(4, tp=2), Training("adamw", "zero1", microbatches=4)),
    "tp4, ZeRO-1": (Mesh(4, tp=4), Training("adamw", "zero1")),
    "pp2 dp2, ZeRO-1, 4 microbatches": (Mesh(4, pp=2), Training("adamw", "zero1", microbatches=4)),
    "pp2 tp2, ZeRO-1, 2 microbatches": (Mesh(4, pp=2, tp=2), Training("adamw", "zero1", microbatches=2)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only those whose name holds this text")
    args = parser.parse_args()
    print(f"torch {torch.__version__}; {len(SCHEDULE)} steps with learning rates {SCHEDULE}\n")
    print("| case | compiled | run | uploads | host reads | collectives of a step | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, (mesh, case) in CASES.items():
        if args.cases not in name:
            continue
        start = time.perf_counter()
        found = programs.scheduled(mesh, case)
        if not all(torch.isfinite(value).all() for state in found.states for value in state.values()):
            raise SystemExit(f"{name}: the weights are not finite after {len(SCHEDULE)} steps")
        run = [sum(0 in one.ranks for one in step) for step in found.runs]
        last = [found.programs[one.program] for one in found.runs[-1] if 0 in one.ranks]
        counts = sum((program.counts() for program in last), Counter())
        kinds = ", ".join(f"{count} {kind} {axis}" for (kind, axis), count in sorted(counts.items()))
        seconds = time.perf_counter() - start
        cells = (name, found.compiled, run, found.uploads, found.host_reads, kinds, f"{seconds:.0f}")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    main()

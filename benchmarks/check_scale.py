"""Cost of `spmd.check` as a world grows along dp: time, memory and plays of a 70B Llama on 256 to 65,536 ranks.

    python benchmarks/check_scale.py            # tp 8, sequence parallel, pp 4 and pp 16
    python benchmarks/check_scale.py --quick    # a 1B Llama, once: whether it works

Each check is a process of its own, examples/check_llama.py, whose seconds include the import of transformers. The
worlds take turns, and ratios are those of CPU times in one round, to the smallest world of the same pp.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from common import heading, parser

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "check_llama.py"
TP = 8
GOAL = "ratio 1.2, 20 s, 1 GiB"


class Cost(NamedTuple):
    wall: float
    cpu: float
    memory: float  # GiB
    plays: int
    programs: int


def cost(size: str, world: int, pp: int) -> Cost:
    """One check of a world.

    Raises:
        RuntimeError: it did not end with a good report.
    """
    sizes = ["--tp", str(TP), "--pp", str(pp), "--dp", str(world // (TP * pp))]
    command = [sys.executable, str(EXAMPLE), "--size", size, *sizes, "--sequence-parallel", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    report = json.loads(done.stdout)
    line = re.search(r"([\d.]+) s, ([\d.]+) GiB at most, ([\d.]+) s of CPU", done.stderr)
    assert line is not None, done.stderr
    wall, memory, cpu = map(float, line.groups())
    return Cost(wall, cpu, memory, report["runs"], report["programs"])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--size", default="70b", help="of the model")
    options.add_argument("--pp", type=int, nargs="*", default=[4, 16], help="pipeline-parallel sizes")
    options.add_argument("--ranks", type=int, nargs="*", default=[256, 4096, 65536], help="sizes of the world")
    options.add_argument("--rounds", type=int, default=3, help="checks of each world")
    args = options.parse_args()
    size, rounds = ("1b", 1) if args.quick else (args.size, args.rounds)
    heading(f"spmd.check of a {size} Llama, tp {TP}, sequence parallel; goal: {GOAL}")
    print(f"{'pp':>3}{'ranks':>8}{'wall s':>9}{'CPU s':>8}{'GiB':>7}{'plays':>7}{'programs':>10}{'ratio':>8}")
    for pp in args.pp:
        costs_by_round = [[cost(size, world, pp) for world in args.ranks] for _ in range(rounds)]
        for world, costs, first in zip(
            args.ranks, zip(*costs_by_round), [[row[0] for row in costs_by_round]] * len(args.ranks)
        ):
            wall, cpu = (statistics.median(getattr(cost, name) for cost in costs) for name in ("wall", "cpu"))
            ratio = statistics.median(cost.cpu / base.cpu for cost, base in zip(costs, first))
            memory, plays, programs = max(cost.memory for cost in costs), costs[0].plays, costs[0].programs
            print(f"{pp:>3}{world:>8}{wall:>9.1f}{cpu:>8.1f}{memory:>7.2f}{plays:>7}{programs:>10}{ratio:>8.2f}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

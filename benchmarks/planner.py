"""The planner's predictions of a training step against measured ones: CPU, 2 and 4 ranks, two sizes of Llama.

All layouts of a number of ranks stay in memory and take turns, step by step. The cluster is measured in the same job,
and corrected by a third of the layouts; errors are those of the others. Layouts of one model have the same batch, so
that the planner's choice can be held against the fastest measured one. On a loaded machine wall time says little: the
CPU time of a rank is predicted too, by the same terms without waiting.

    python benchmarks/planner.py [--quick] [--rounds 9] [--worlds 2 4] [--out results.json] [--of results.json]

`--of` predicts the steps of an earlier run again, without measuring. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from common import heading, on_ranks, parser, quiet  # first: sets the threads

# isort: split
from transformers import LlamaConfig

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.context import Context
from neuronx_dist.planner import Candidate, Cluster, Predictor, Workload, workload_of
from neuronx_dist.planner.calibration import calibrated, mape, rank_correlation, regret
from neuronx_dist.planner.validation import TrainingJob
from neuronx_dist.planning.layout import Layout
from neuronx_dist.planning.memory import estimate_memory

SEQ = 128
MODELS = {
    128: dict(intermediate_size=352, num_attention_heads=4),
    256: dict(intermediate_size=704, num_attention_heads=8),
}
# The first of three calibrates.
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [
        dict(tp=2),
        dict(tp=2, num_microbatches=4),
        dict(tp=2, sequence_parallel=True),
        dict(tp=2, sequence_parallel=True, num_microbatches=4),
        dict(pp=2, num_microbatches=2),
        dict(pp=2, num_microbatches=4),
        dict(pp=2, num_microbatches=8),
        dict(),
        dict(num_microbatches=4),
        dict(zero1=True),
        dict(zero1=True, num_microbatches=4),
        dict(cp=2),
        dict(cp=2, zero1=True, num_microbatches=2),
    ],
    4: [
        dict(tp=2),
        dict(tp=2, zero1=True, num_microbatches=2),
        dict(tp=2, sequence_parallel=True, zero1=True),
        dict(tp=2, pp=2, num_microbatches=4),
        dict(tp=2, pp=2, num_microbatches=8),
        dict(tp=2, sequence_parallel=True, pp=2, num_microbatches=4),
        dict(pp=2, num_microbatches=4),
        dict(pp=2, zero1=True, num_microbatches=4),
        dict(),
        dict(zero1=True),
        dict(num_microbatches=2),
        dict(tp=2, cp=2, sequence_parallel=True),
    ],
}
GOALS = {"mape": 0.08, "rank_correlation": 0.95, "regret": 0.05, "memory": 0.01}


class Case(NamedTuple):
    """A model, by its hidden size, and a layout."""

    hidden: int
    layout: Layout

    @property
    def config(self) -> Any:
        heads = MODELS[self.hidden]["num_attention_heads"]
        return LlamaConfig(
            **MODELS[self.hidden],
            vocab_size=512,
            hidden_size=self.hidden,
            num_hidden_layers=4,
            num_key_value_heads=heads // 2,
            max_position_embeddings=SEQ,
            use_cache=False,
        )

    @property
    def candidate(self) -> Candidate:
        return _candidate(self.layout)

    @property
    def workload(self) -> Workload:
        return _workload(self.hidden)

    def __str__(self) -> str:
        layout = self.layout
        words = [f"{name}{getattr(layout, name)}" for name in ("tp", "pp", "cp", "dp") if getattr(layout, name) > 1]
        words += ["sp"] * layout.sequence_parallel + ["zero1"] * layout.zero1
        return " ".join([f"{layout.world_size} ranks, h{self.hidden}", *words, f"m{layout.num_microbatches}"])


@cache  # a fit predicts each case some hundred times
def _candidate(layout: Layout) -> Candidate:
    return Candidate(layout)


@cache
def _workload(hidden: int) -> Workload:
    return workload_of(Case(hidden, Layout(world_size=1)).config)


class Step(NamedTuple):
    """A case's measured step: median wall seconds of the slowest rank, CPU seconds of all ranks, peak bytes."""

    seconds: float
    cpu_seconds: float
    peak: int


def cases(world: int) -> list[Case]:
    batch = 4 * world
    return [
        Case(hidden, Layout(world_size=world, global_batch=batch, seq_len=SEQ, **options))
        for hidden in MODELS
        for options in LAYOUTS[world]
    ]


def measure(world: int, rounds: int, seconds: float) -> tuple[dict[str, Any], list[Step]]:
    """On every rank: the cluster, by the content of its file, and each case's step."""
    nxd.initialize_model_parallel(tensor_model_parallel_size=2)
    cluster = Cluster.measure(f"cpu of {world} ranks", seconds=seconds)
    rank, backend = comm.current().rank, comm.current().backend
    jobs, peaks = [], []
    times: list[list[tuple[float, float]]] = []
    contexts: dict[nxd.Mesh, Context] = {}
    for case in cases(world):
        mesh = case.layout.mesh()
        if mesh not in contexts:
            contexts[mesh] = Context(mesh, rank, backend)
            contexts[mesh].extras["compared_models"] = 1000 * len(contexts)  # a name for each model of the job
        context = contexts[mesh]
        with comm.context.use(context):
            job = TrainingJob(case.layout, case.config)
            peaks.append(job.measure(1, warmup=1).peak)
        jobs.append((context, job))
        times.append([])
    quiet()
    order = list(range(len(jobs)))
    for number in range(rounds):
        random.Random(number).shuffle(order)
        for index in order:
            context, job = jobs[index]
            with comm.context.use(context):
                times[index].append(job.timed())
    ranks = comm.gather_objects(times)
    steps = []
    for index, peak in enumerate(peaks):
        walls = [max(rank[index][turn][0] for rank in ranks) for turn in range(rounds)]
        cpus = [sum(rank[index][turn][1] for rank in ranks) for turn in range(rounds)]
        steps.append(Step(median(walls), median(cpus), peak))
    return cluster.as_dict(), steps


def predict(cluster: Cluster, case: Case) -> float:
    """Returns the predicted seconds of a step; `cluster` was measured with all ranks at work.

    Where ranks share cores, one that waits in a pipeline leaves its core to others: the step takes as long as all ranks
    compute on average, or as the pipeline with a core for each rank, whichever is longer.
    """
    total = Predictor(case.workload, cluster).seconds(case.candidate).total
    cores = os.cpu_count() or 1
    if case.layout.pp == 1 or cores >= case.layout.world_size:
        return total
    return max(predict_busy(cluster, case), total * cores / case.layout.world_size)


def predict_busy(cluster: Cluster, case: Case) -> float:
    """Returns the predicted seconds in which a rank does not wait, the mean over the stages: its CPU time."""
    predictor, candidate = Predictor(case.workload, cluster), case.candidate
    stages = [sum(map(sum, chunks)) for chunks in predictor.tasks(candidate)]
    return case.layout.num_microbatches * sum(stages) / len(stages) + sum(predictor.after(candidate))


def report(world: int, cluster: Cluster, steps: list[Step]) -> dict[str, Any]:
    observed = list(zip(cases(world), steps))
    fitted = calibrated(cluster, predict, [(case, step.seconds) for case, step in observed[::3]])
    print(f"measured   {cluster}\ncorrected  {fitted}\n")
    of_cpu = [(case, step.cpu_seconds / world) for case, step in observed]
    busy = calibrated(cluster, predict_busy, of_cpu[::3])
    rows = []
    for number, (case, step) in enumerate(observed):
        memory = estimate_memory(case.layout, case.config, fused_loss=True).peak / step.peak - 1
        rows.append((case, step, predict(cluster, case), predict(fitted, case), memory))
        before, after = rows[-1][2] / step.seconds - 1, rows[-1][3] / step.seconds - 1
        print(
            f"{case!s:42}{step.seconds * 1e3:8.1f} ms (CPU of a rank {step.cpu_seconds / world * 1e3:6.1f})  "
            f"measured cluster {before:+6.1%}  corrected {after:+6.1%}{' *' if number % 3 == 0 else '  '}"
            f"  peak {step.peak / 2**20:6.1f} MiB {memory:+.2%}"
        )
    held_out = [row for number, row in enumerate(rows) if number % 3]
    regrets = []
    for hidden in MODELS:
        same = [row for row in rows if row[0].hidden == hidden]
        regrets.append(regret([row[3] for row in same], [row[1].seconds for row in same]))
    measured = [row[1].seconds for row in held_out]
    in_cpu = [entry for number, entry in enumerate(of_cpu) if number % 3]
    ours, theirs = [predict_busy(busy, case) for case, _ in in_cpu], [seconds for _, seconds in in_cpu]
    return {
        "layouts": len(rows),
        "held_out": len(held_out),
        "mape": mape([row[3] for row in held_out], measured),
        "mape_before_correction": mape([row[2] for row in held_out], measured),
        "rank_correlation": rank_correlation([row[3] for row in held_out], measured),
        "regret": max(regrets),
        "mape_cpu": mape(ours, theirs),
        "rank_correlation_cpu": rank_correlation(ours, theirs),
        "memory": max(abs(row[4]) for row in rows),
    }


def main() -> None:
    add = parser(__doc__)
    add.add_argument("--rounds", type=int, default=9)
    add.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    add.add_argument("--out", type=Path)
    add.add_argument("--of", type=Path)
    options: Any = add.parse_args()
    rounds = 3 if options.quick else options.rounds
    heading("Predicted and measured training steps")
    found: dict[str, Any] = json.loads(options.of.read_text()) if options.of else {}
    figures = {}
    for world in options.worlds:
        if not options.of:
            found[str(world)] = on_ranks(measure, world, world, rounds, 4.0 if options.quick else 30.0)
            if options.out:
                options.out.write_text(json.dumps(found))
        content, steps = found[str(world)]
        figures[f"{world} ranks"] = report(world, Cluster.of_dict(content), [Step(*step) for step in steps])
        print()
    for name, values in figures.items():
        missed = [goal for goal in GOALS if (values[goal] < GOALS[goal]) == (goal == "rank_correlation")]
        print(f"{name}: {values}; missed: {', '.join(missed) or 'none'}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

"""A pipeline's step over the ideal of its schedule, and the CPU that a rank spends on each task of it.

Real processes over gloo on loopback. Layers that sleep take no core, so that a step is as long as its schedule makes
it, and what is on top of that is the pipeline's own work: ours, torch's (`torch.distributed.pipelining`), and 40
hand-written lines. A transformer block computes in earnest: where there are fewer cores than stages, what counts of it
is the ratio to the hand-written step. All variants take turns, in one run, and must give one loss.

    python benchmarks/pipeline.py [--quick] [--rounds 8] [--stages 2 4] [--microbatches 8 16] [--layers sleep block]

/ ideal   the step over that of the schedule, if layers sleep as long as they are told and nothing else takes time
best      the same, of the shortest step
/ alone   the same, if layers take as long as they do without a pipeline ("layers alone": they wake up late, too)
CPU       of a rank's process, gloo's thread as well, and of the thread that runs Python: for each task (a forward, a
          backward, or a half of one), then without what the layers take alone

The last line is JSON.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from common import Seconds, heading, on_ranks, parser, ratio, take_turns  # first: sets the threads
from handwritten_pipeline import one_f_one_b

# isort: split
import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import torch.nn.functional as F
from torch import nn

import neuronx_dist as nxd
from neuronx_dist.pipeline.schedule import Schedule, training_schedule
from neuronx_dist.pipeline.schedule.analysis import Costs, timeline_of

FORWARD = BACKWARD_INPUT = BACKWARD_WEIGHT = 0.010  # seconds that a stage sleeps for a microbatch
ROWS, HIDDEN, TOKENS = 4, 64, 128
CHUNKS = 2  # layers of each stage, so that schedules of two chunks have one layer in each
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb_h1": 1, "zb_v": 2}  # chunks on a stage
TORCH = {
    "1f1b": torch_pipelining.Schedule1F1B,
    "gpipe": torch_pipelining.ScheduleGPipe,
    "interleaved": torch_pipelining.ScheduleInterleaved1F1B,
    "zb_v": torch_pipelining.ScheduleZBVZeroBubble,
}
GOALS = {("1f1b", 2): 1.03, ("1f1b", 4): 1.06, ("interleaved", 2): 1.08, ("interleaved", 4): 1.08}
HOST_GOAL = 0.3  # ms of CPU for each task, without its layers
ZERO_BUBBLE_GOAL = 0.85


class Activations(torch.autograd.Function):
    """Work that depends on the input: sleeps in forward, and for the input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        nap(FORWARD / CHUNKS, x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        nap(BACKWARD_INPUT / CHUNKS, grad)
        return grad


class Weights(torch.autograd.Function):
    """Work that depends on the weight alone: sleeps for its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        nap(BACKWARD_WEIGHT / CHUNKS, grad)
        return grad


def nap(seconds: float, x: torch.Tensor) -> None:
    if type(x) is torch.Tensor:  # not while it is recorded
        time.sleep(seconds)


class SleepingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Activations.apply(x) + Weights.apply(self.weight)


class Block(nn.Module):
    """A transformer block: attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


LAYERS = {"sleep": SleepingLayer, "block": Block}


class Model(nn.Module):
    def __init__(self, layer: type[nn.Module], count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return loss_of(x, target)


def loss_of(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (x - target).square().mean()


class Variant(NamedTuple):
    """A step, which gives the mean loss on the stage that has it; and what holds the gradients."""

    step: Callable[[], torch.Tensor | None]
    module: nn.Module


class Batch(NamedTuple):
    x: torch.Tensor
    target: torch.Tensor
    microbatches: int

    @property
    def pieces(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.x.chunk(self.microbatches), self.target.chunk(self.microbatches)))


def ours(schedule: str, layer: str, batch: Batch) -> Variant:
    chunks = SCHEDULES[schedule]
    model = nxd.NxDPPModel(
        Model(LAYERS[layer], CHUNKS * dist.get_world_size()),
        transformer_layer_cls=LAYERS[layer],
        num_microbatches=batch.microbatches,
        output_loss_value_spec=True,
        auto_partition=True,
        schedule=schedule,
        virtual_pipeline_size=chunks,
    )
    return Variant(lambda: model.run_train(x=batch.x, target=batch.target), model)


def theirs(schedule: str, layer: str, batch: Batch) -> Variant:
    """torch's. Its stages are modules of their own."""
    rank, size, chunks = dist.get_rank(), dist.get_world_size(), SCHEDULES[schedule]
    pieces = size * chunks
    local_pieces = [rank] if chunks == 1 else [rank, pieces - 1 - rank if schedule == "zb_v" else rank + size]
    layers = Model(LAYERS[layer], CHUNKS * size).layers
    count = len(layers) // pieces
    modules = {index: nn.Sequential(*layers[index * count : (index + 1) * count]) for index in local_pieces}
    stages = [
        torch_pipelining.PipelineStage(module, index, pieces, torch.device("cpu")) for index, module in modules.items()
    ]
    last = pieces - 1 in local_pieces
    runner = TORCH[schedule](stages if chunks > 1 else stages[0], batch.microbatches, loss_fn=loss_of)
    inputs = (batch.x,) if rank == 0 else ()
    targets = {"target": batch.target} if last else {}

    def step() -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        runner.step(*inputs, losses=losses, return_outputs=False, **targets)
        return torch.stack([loss.detach() for loss in losses]).mean() if last else None

    return Variant(step, nn.ModuleList(modules.values()))


def own_layers(layer: str) -> nn.Sequential:
    """The layers of this rank's stage, one after the other."""
    rank = dist.get_rank()
    return nn.Sequential(*Model(LAYERS[layer], CHUNKS * dist.get_world_size()).layers[rank * CHUNKS :][:CHUNKS])


def by_hand(layer: str, batch: Batch) -> Variant:
    stage, pieces = own_layers(layer), batch.pieces

    def step() -> torch.Tensor | None:
        losses = one_f_one_b(stage, [x for x, _ in pieces], lambda out, index: loss_of(out, pieces[index][1]))
        return torch.stack(losses).mean() if losses else None

    return Variant(step, stage)


def alone(layer: str, batch: Batch) -> Variant:
    """No pipeline: each rank runs its own layers."""
    stage, pieces = own_layers(layer), [x.clone().requires_grad_(dist.get_rank() > 0) for x, _ in batch.pieces]
    grad = torch.ones_like(pieces[0])

    def step() -> None:
        for x in pieces:
            stage(x).backward(grad)

    return Variant(step, stage)


def variants(layer: str, batch: Batch) -> dict[str, Variant]:
    built = {"by hand": by_hand(layer, batch), "layers alone": alone(layer, batch)}
    built |= {f"ours {name}": ours(name, layer, batch) for name in SCHEDULES}
    built |= {f"torch {name}": theirs(name, layer, batch) for name in TORCH}
    built["ours 1f1b again"] = ours("1f1b", layer, batch)
    return built


def schedule_of(name: str, pp: int, microbatches: int) -> Schedule:
    known = next((key for key in SCHEDULES if f" {key}" in name), "1f1b")
    return training_schedule(pp, microbatches, schedule=known, num_chunks=SCHEDULES[known])


def ideal_of(schedule: Schedule) -> float:
    """Seconds of a step in which nothing takes time but the layers."""
    share = 1 / schedule.num_chunks
    costs = Costs(FORWARD * share, BACKWARD_INPUT * share, BACKWARD_WEIGHT * share)
    orders = [schedule.computations(stage) for stage in range(schedule.num_stages)]
    return max(timed.end for tasks in timeline_of(orders, schedule.peer, costs) for timed in tasks)


def tasks(schedule: Schedule) -> int:
    """Forwards and backwards, or halves of these, of all stages in a step."""
    return sum(len(schedule.computations(stage)) for stage in range(schedule.num_stages))


def measure(layer: str, microbatches: int, rounds: int) -> dict[str, list[Seconds]]:
    """Each variant's seconds, round by round."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: else each sleep is 50 µs too long
    nxd.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    shape = (microbatches * ROWS, HIDDEN) if layer == "sleep" else (microbatches * ROWS, TOKENS, HIDDEN)
    torch.manual_seed(1)
    batch = Batch(torch.randn(shape), torch.randn(shape), microbatches)
    built = variants(layer, batch)
    check(built)

    def clear(name: str) -> None:
        built[name].module.zero_grad()

    by_variant = take_turns({name: variant.step for name, variant in built.items()}, rounds, clear)
    nxd.destroy_model_parallel()
    return by_variant


def check(built: dict[str, Variant]) -> None:
    """All pipelines have the loss of the one by hand."""
    for name, variant in built.items():
        loss = variant.step()
        variant.module.zero_grad()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, None if loss is None else loss.item())
        values = [value for value in everyone if value is not None]
        if name == "by hand":
            expected = values
        if name != "layers alone":
            assert len(values) == 1 and abs(values[0] - expected[0]) < 1e-5 * expected[0], (name, values, expected)


def show(layer: str, pp: int, microbatches: int, by_variant: dict[str, list[Seconds]]) -> dict[str, dict[str, float]]:
    """Prints a row for each variant; returns the figures."""
    sleeps = layer == "sleep"
    print(f"{layer} layers, pp {pp}, {microbatches} microbatches")
    columns = f"{'/ ideal':>9}{'best':>7}{'/ alone':>9}" if sleeps else f"{'/ hand':>9}{'±':>7}"
    print(f"  {'':<20}{'ms':>8}{columns}{'CPU ms':>9}{'Python':>8}{'own CPU':>9}{'Python':>8}  a task")
    alone = by_variant["layers alone"]
    slower = statistics.median(one.wall for one in alone) / (
        microbatches * (FORWARD + BACKWARD_INPUT + BACKWARD_WEIGHT)
    )
    report = {}
    for name, seconds in by_variant.items():
        schedule = schedule_of(name, pp, microbatches)
        walls = [one.wall for one in seconds]
        figures = {"ms": statistics.median(walls) * 1e3}
        cells = f"{figures['ms']:>8.1f}"
        if sleeps:
            ideal = ideal_of(schedule) if name != "layers alone" else microbatches * 3 * FORWARD
            over = figures["ms"] / 1e3 / ideal
            figures |= {"over_ideal": over, "best_over_ideal": min(walls) / ideal, "over_alone": over / slower}
            cells += f"{over:>9.3f}{min(walls) / ideal:>7.3f}{over / slower:>9.3f}"
        else:
            figures["over_hand"], interval = ratio(walls, [one.wall for one in by_variant["by hand"]])
            cells += f"{figures['over_hand']:>9.3f}{interval:>7.3f}"
        for key in ("cpu", "thread"):
            mine, layers = (statistics.median(getattr(one, key) for one in times) for times in (seconds, alone))
            figures[f"{key}_ms"] = mine / tasks(schedule) * 1e3
            figures[f"own_{key}_ms"] = (mine - layers) / tasks(schedule) * 1e3
        cells += f"{figures['cpu_ms']:>9.3f}{figures['thread_ms']:>8.3f}"
        print(f"  {name:<20}{cells}{figures['own_cpu_ms']:>9.3f}{figures['own_thread_ms']:>8.3f}", flush=True)
        report[name] = {key: round(value, 4) for key, value in figures.items()}
    print()
    if sleeps:
        judge(pp, microbatches, by_variant, report)
    return report


def judge(
    pp: int, microbatches: int, by_variant: dict[str, list[Seconds]], report: dict[str, dict[str, float]]
) -> None:
    """Prints what was to be reached, and whether it was."""
    rows = [
        (f"{name} over ideal", report[f"ours {name}"]["over_ideal"], goal)
        for (name, size), goal in GOALS.items()
        if size == pp
    ]
    rows.append(("own CPU of a task, ms, 1f1b", report["ours 1f1b"]["own_cpu_ms"], HOST_GOAL))
    if pp == 4 and microbatches == 8:
        walls = {name: [one.wall for one in by_variant[f"ours {name}"]] for name in ("zb_v", "1f1b")}
        rows.append(("zb_v over 1f1b", ratio(walls["zb_v"], walls["1f1b"])[0], ZERO_BUBBLE_GOAL))
    for what, value, goal in rows:
        print(f"  {what:<30}{value:>7.3f}   goal {goal}: {'met' if value <= goal else 'MISSED'}")
    print(flush=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=8, help="steps of each variant")
    options.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    options.add_argument("--microbatches", type=int, nargs="+", help="(default: 8 16, with --quick 8)")
    options.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    args = options.parse_args()
    heading("Steps of a pipeline: sleeping layers (forward, input and weight gradient 10 ms each a stage), and a block")
    report = {}
    for layer in args.layers:
        for pp in args.stages:
            for microbatches in args.microbatches or ([8] if args.quick else [8, 16]):
                by_variant = on_ranks(measure, pp, layer, microbatches, 3 if args.quick else args.rounds)
                report[f"{layer} pp{pp} m{microbatches}"] = show(layer, pp, microbatches, by_variant)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

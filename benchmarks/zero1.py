"""A data-parallel training step with a sharded optimizer: ours, torch's, and one written by hand, over DDP + AdamW.

    ddp          DistributedDataParallel, and AdamW(fused) of all parameters on every rank
    redundancy   DistributedDataParallel, and torch's ZeroRedundancyOptimizer
    fsdp         torch's fully_shard (FSDP2) of each layer, AdamW(fused) of the shards
    flat         ZeRO-1 by hand: parameters and gradients are views of two flat buffers; a rank owns a piece of them
    ours         reduce-scatter, AdamW(fused) of the shards, all-gather: NeuronZero1Optimizer
    overlap      ours with overlap=True; its gathers are awaited at the end of the step, where turns end
    reduce       reduce_gradients, and AdamW(fused) of all parameters on every rank: ours without ZeRO
    reduce_overlap   the same with overlap=True, which is what DDP does
    again        ddp once more, which shows the noise

A transformer of 21M parameters in fp32, few tokens, so that what lies between the steps counts. Processes on loopback,
turn by turn; a round gives each variant's CPU time of all ranks, and what is reported is the median over the rounds of
a round's ratio to `ddp`. Losses must agree before anything is timed. `--clip` adds clipping to all of them.

    python benchmarks/zero1.py [--quick] [--ranks 2 4] [--rounds 20] [--variants ddp ours ...] [--profile]

The last line is JSON: `{"2 ranks": {"ours_over_ddp": CPU, ..., "again_over_ddp": CPU}, ...}`.
"""

from __future__ import annotations

import json
import resource
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from common import heading, on_ranks, parser, ratio, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import neuronx_dist as nxd
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.parallel_layers.grads import reduce_gradients

HIDDEN, LAYERS, VOCABULARY, TOKENS = 512, 6, 4096, 32
OPTIONS: dict[str, Any] = dict(lr=1e-3, fused=True)
GOAL = 0.95

Step = Callable[[], float]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(1, TOKENS, 3, 8, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class Model(nn.Module):
    """`[1, TOKENS]` ids to a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randint(VOCABULARY, (1, TOKENS), generator=generator)


def stepper(
    model: nn.Module,
    optimizer: Any,
    clip: float | None,
    reduce: Callable[[], None] = lambda: None,
    zero: Callable[[], None] | None = None,
) -> Step:
    """A step: backward, `reduce`, clipping where the optimizer does not do it, update, `zero`."""
    ids = batch()

    def step() -> float:
        loss = model(ids)
        loss.backward()
        reduce()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        (zero or optimizer.zero_grad)()
        return loss.item()

    return step


def ddp(clip: float | None) -> Step:
    model = DistributedDataParallel(Model())
    return stepper(model, torch.optim.AdamW(model.parameters(), **OPTIONS), clip)


def redundancy(clip: float | None) -> Step:
    model = DistributedDataParallel(Model())
    return stepper(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **OPTIONS), clip)


def fsdp(clip: float | None) -> Step:
    model = Model()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return stepper(model, torch.optim.AdamW(model.parameters(), **OPTIONS), clip)


def ours(clip: float | None, **options: Any) -> Step:
    model = Model()
    clipping: dict[str, Any] = dict(grad_clipping=False) if clip is None else dict(max_norm=clip)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, **OPTIONS, **clipping, **options)

    def zero() -> None:
        optimizer.wait()
        optimizer.zero_grad()

    return stepper(model, optimizer, None, partial(reduce_gradients, model, average_over_data=False), zero)


def reduced(clip: float | None, **options: Any) -> Step:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
    return stepper(model, optimizer, clip, partial(reduce_gradients, model, **options))


def flat(clip: float | None) -> Step:
    """The exchanges are gloo's: an all_to_all and a sum in rank order, and an all_to_all of one piece to everybody."""
    model, size, rank = Model(), dist.get_world_size(), dist.get_rank()
    params = list(model.parameters())
    count = sum(param.numel() for param in params)
    values, grads = (torch.zeros(-(-count // size) * size) for _ in range(2))
    begin = 0
    for param in params:
        values[begin : begin + param.numel()].view_as(param).copy_(param.detach())
        param.data = values[begin : begin + param.numel()].view_as(param)
        param.grad = grads[begin : begin + param.numel()].view_as(param)
        begin += param.numel()
    mine = nn.Parameter(values.view(size, -1)[rank])
    optimizer = torch.optim.AdamW([mine], **OPTIONS)
    received = torch.empty(size, mine.numel())

    def reduce() -> None:
        dist.all_to_all_single(received, grads)
        mine.grad = received.sum(0).div_(size)
        if clip is not None:
            square = mine.grad.square().sum()
            dist.all_reduce(square)
            mine.grad.mul_((clip / (square.sqrt() + 1e-6)).clamp(max=1.0))

    def gather() -> None:
        peers = [peer for peer in range(size) if peer != rank]
        pieces = values.view(size, -1)
        works = [dist.irecv(pieces[peer], peer) for peer in peers] + [dist.isend(pieces[rank], peer) for peer in peers]
        for work in works:
            work.wait()
        grads.zero_()

    return stepper(model, optimizer, None, reduce, gather)


VARIANTS: dict[str, Callable[[float | None], Step]] = {
    "ddp": ddp,
    "redundancy": redundancy,
    "fsdp": fsdp,
    "flat": flat,
    "ours": ours,
    "overlap": partial(ours, overlap=True),
    "reduce": reduced,
    "reduce_overlap": partial(reduced, overlap=True),
    "again": ddp,
}


def measure(names: list[str], clip: float | None, rounds: int) -> dict[str, list[Any]]:
    nxd.initialize_model_parallel()
    steps = {name: VARIANTS[name](clip) for name in names}
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
    for name, found in losses.items():
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses["ddp"]), rtol=1e-4, atol=1e-4, msg=name)
    seconds = take_turns(steps, rounds)
    nxd.destroy_model_parallel()
    return seconds


def profile(name: str, clip: float | None) -> str:
    """Profiles the CPU time of one rank's steps."""
    nxd.initialize_model_parallel()
    step = VARIANTS[name](clip)
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(10):
            step()
    nxd.destroy_model_parallel()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return f"{profiler.key_averages().table(sort_by='self_cpu_time_total', row_limit=20)}\npeak memory {peak:.0f} MiB"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    options.add_argument("--rounds", type=int, default=20)
    options.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options.add_argument("--clip", type=float, help="norm to clip at; without it nothing is clipped")
    options.add_argument("--profile", action="store_true", help="of the first variant that is not ddp, on 2 ranks")
    args = options.parse_args()
    heading("a step of 21M parameters in fp32, AdamW(fused): CPU time of all ranks")
    if args.profile:
        print(on_ranks(profile, args.ranks[0], next(name for name in args.variants if name != "ddp"), args.clip))
        return
    names = ["ddp", *(name for name in args.variants if name != "ddp")]
    report: dict[str, dict[str, float]] = {}
    print(f"{'ranks':<7}{'variant':<16}{'CPU ms':>9}{'over ddp':>11}{'±':>8}", flush=True)
    for ranks in args.ranks:
        seconds = on_ranks(measure, ranks, names, args.clip, 4 if args.quick else args.rounds)
        cpu = {name: [one.cpu for one in found] for name, found in seconds.items()}
        found = report[f"{ranks} ranks"] = {}
        for name in names:
            middle, interval = ratio(cpu[name], cpu["ddp"])
            line = (
                f"{ranks:<7}{name:<16}{statistics.median(cpu[name]) * 1e3 / ranks:>9.1f}{middle:>11.3f}{interval:>8.3f}"
            )
            print(line, flush=True)
            if name != "ddp":
                found[f"{name}_over_ddp"] = round(middle, 3)
        if "ours" in names:
            print(f"ours over ddp, goal {GOAL}: {'met' if found['ours_over_ddp'] <= GOAL else 'MISSED'}", flush=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""A data-parallel training step with Muon of the matrices and AdamW of the rest: ours, and by hand, over DDP + Muon.

    ddp      DistributedDataParallel, and torch.optim.Muon and AdamW of all parameters on every rank
    owners   DistributedDataParallel; the ranks orthogonalise matrices in turn, and broadcast the new weights
    ours     NeuronZero1Optimizer(muon_groups(model), MuonAdamW)
    overlap  ours with overlap=True; its gathers are awaited at the end of the step
    again    ddp once more, which shows the noise

The model and the method are those of zero1.py: medians over the rounds of a round's ratio to `ddp`, of the CPU time of
all ranks and of the time of a step. Losses must agree before anything is timed.

    python benchmarks/muon.py [--quick] [--ranks 2 4] [--rounds 10]

The last line is JSON: `{"2 ranks": {"ours_over_ddp": CPU, "ours_over_ddp_time": TIME, ...}, ...}`.
"""

from __future__ import annotations

import json
import statistics
from functools import partial
from typing import Any

from common import heading, on_ranks, parser, ratio, take_turns  # first: sets the threads

# isort: split
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from zero1 import Model, Step, stepper

import neuronx_dist as nxd
from neuronx_dist.optimizer import MuonAdamW, NeuronZero1Optimizer, muon_groups
from neuronx_dist.parallel_layers.grads import reduce_gradients

OPTIONS: dict[str, Any] = dict(lr=1e-3, weight_decay=0.1)
GOAL = 0.6


class Both:
    """torch's two optimizers, of which `owns` leaves a rank some matrices."""

    def __init__(self, model: Model, by_owners: bool) -> None:
        muon, adamw = (list(group["params"]) for group in muon_groups(model))
        self.matrices = [param for _, param in muon]
        self.by_owners, self.size, rank = by_owners, dist.get_world_size(), dist.get_rank()
        owned = self.matrices[rank :: self.size] if by_owners else self.matrices
        self.optimizers = [
            torch.optim.Muon(owned, adjust_lr_fn="match_rms_adamw", **OPTIONS),
            torch.optim.AdamW([param for _, param in adamw], betas=(0.9, 0.95), **OPTIONS),
        ]
        self.zero_grad = model.zero_grad

    @torch.no_grad()
    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.by_owners:
            works = [dist.broadcast(x, at % self.size, async_op=True) for at, x in enumerate(self.matrices)]
            for work in works:
                work.wait()


def ddp(by_owners: bool = False) -> Step:
    model = Model()
    optimizer = Both(model, by_owners)
    return stepper(DistributedDataParallel(model), optimizer, None)


def ours(**options: Any) -> Step:
    model = Model()
    optimizer = NeuronZero1Optimizer(muon_groups(model), MuonAdamW, grad_clipping=False, **OPTIONS, **options)

    def zero() -> None:
        optimizer.wait()
        optimizer.zero_grad()

    return stepper(model, optimizer, None, partial(reduce_gradients, model, average_over_data=False), zero)


VARIANTS = {
    "ddp": ddp,
    "owners": partial(ddp, by_owners=True),
    "ours": ours,
    "overlap": partial(ours, overlap=True),
    "again": ddp,
}


def measure(rounds: int) -> dict[str, list[Any]]:
    nxd.initialize_model_parallel()
    steps = {name: make() for name, make in VARIANTS.items()}
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
    for name, found in losses.items():
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses["ddp"]), rtol=1e-3, atol=1e-3, msg=name)
    seconds = take_turns(steps, rounds)
    nxd.destroy_model_parallel()
    return seconds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    options.add_argument("--rounds", type=int, default=10)
    args = options.parse_args()
    heading("a step of 21M parameters in fp32, Muon and AdamW")
    report: dict[str, dict[str, float]] = {}
    print(
        f"{'ranks':<7}{'variant':<12}{'CPU ms':>9}{'over ddp':>11}{'±':>8}{'ms':>9}{'over ddp':>11}{'±':>8}", flush=True
    )
    for ranks in args.ranks:
        seconds = on_ranks(measure, ranks, 4 if args.quick else args.rounds)
        found = report[f"{ranks} ranks"] = {}
        for name in VARIANTS:
            line = f"{ranks:<7}{name:<12}"
            for what, suffix, divisor in (("cpu", "", ranks), ("wall", "_time", 1)):
                values, base = ([getattr(one, what) for one in seconds[key]] for key in (name, "ddp"))
                middle, interval = ratio(values, base)
                line += f"{statistics.median(values) * 1e3 / divisor:>9.1f}{middle:>11.3f}{interval:>8.3f}"
                if name != "ddp":
                    found[f"{name}_over_ddp{suffix}"] = round(middle, 3)
            print(line, flush=True)
        if ranks == 2:
            print(
                f"ours over ddp, goal {GOAL}: {'met' if found['ours_over_ddp_time'] <= GOAL else 'MISSED'}", flush=True
            )
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""Host cost of ShardTensor: plain torch, ours, and torch's DTensor, on tiny tensors of two gloo processes.

CPU time of the main thread, best of some rounds, in which the three take turns; collectives of gradients are in it, and
DTensor leaves those of the weights of a linear layer out.

    python benchmarks/shard_tensor.py [--quick]

The last line is JSON: microseconds a call by variant, and the ratios that have goals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from common import heading, on_ranks, parser, quiet  # first: sets the threads

# isort: split
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor as distribute_dtensor

from neuronx_dist import distributed
from neuronx_dist.distributed import Replicate, Shard

GOALS = {"8 pointwise, both ways / DTensor": 0.30, "8 pointwise, both ways / plain": 2.5, "linear / DTensor": 0.5}


def pointwise(x: torch.Tensor) -> torch.Tensor:
    y = F.gelu(torch.relu(x) * 2.0) + x
    return torch.tanh(torch.sigmoid(y) - 0.5) * y


def programs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Callable[[], Any]]:
    with torch.no_grad():
        start = torch.ones_like(x)

    def both_ways() -> None:
        pointwise(x).backward(start)
        x.grad = None

    def linear() -> None:
        with torch.no_grad():
            F.linear(x, weight, bias)

    def linear_both_ways() -> None:
        F.linear(x, weight, bias).backward(start)
        x.grad = weight.grad = bias.grad = None

    return {
        "relu": lambda: torch.relu(x),
        "times a number": lambda: x * 2.0,
        "8 pointwise": lambda: pointwise(x),
        "8 pointwise, both ways": both_ways,
        "linear": linear,
        "linear, both ways": linear_both_ways,
    }


def measure(quick: bool) -> dict[str, dict[str, float]]:
    """Microseconds of a call, by variant and program."""
    mesh, theirs = distributed.init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2,))
    x, weight, bias = torch.randn(8, 4), torch.randn(4, 4), torch.zeros(4)
    variants = {
        "plain": [x[:4].clone(), weight.clone(), bias.clone()],
        "ours": [
            distributed.distribute_tensor(each, mesh, [placement])
            for each, placement in ((x, Shard(0)), (weight, Replicate()), (bias, Replicate()))
        ],
        "DTensor": [
            distribute_dtensor(each, theirs, [placement])
            for each, placement in ((x, Shard(0)), (weight, Replicate()), (bias, Replicate()))
        ],
    }
    todo = {name: programs(*(each.requires_grad_() for each in tensors)) for name, tensors in variants.items()}
    best: dict[str, dict[str, float]] = {name: {} for name in todo}
    rounds, repeats = (2, 10) if quick else (9, 300)
    quiet()
    for _ in range(rounds):
        for program in todo["plain"]:
            for name in todo:
                call = todo[name][program]
                began = time.thread_time()
                for _ in range(repeats):
                    call()
                seconds = (time.thread_time() - began) / repeats
                best[name][program] = min(best[name].get(program, 1e9), seconds * 1e6)
    return best


def main() -> None:
    options = parser(__doc__).parse_args()
    heading("Host cost of ShardTensor, microseconds of CPU a call")
    best = on_ranks(measure, 2, options.quick)
    print(f"{'':26}" + "".join(f"{name:>10}" for name in best))
    for program in best["plain"]:
        print(f"{program:26}" + "".join(f"{best[name][program]:10.1f}" for name in best))
    ratios = {}
    for goal, limit in GOALS.items():
        program, _, other = goal.partition(" / ")
        ratios[goal] = best["ours"][program] / best[other][program]
        print(f"{goal:36} {ratios[goal]:5.2f}   goal {limit}")
    print(json.dumps({"microseconds": best, "ratios": ratios}))


if __name__ == "__main__":
    main()

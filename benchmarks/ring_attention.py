"""Ring attention over the compute of its blocks: forward and backward, two gloo processes, CPU time of a process.

The blocks by themselves are torch's fused kernels, forward and backward, of this rank's queries and each rank's keys;
nothing travels and nothing is merged. The variants take turns; a ratio is the median over the rounds.

    python benchmarks/ring_attention.py [--quick]

The last line is JSON: the ratios. Goal: ring / blocks <= 1.10, at each length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from common import heading, on_ranks, parser, quiet  # first: sets the threads

# isort: split
import torch
import torch.nn.functional as F

from neuronx_dist import distributed
from neuronx_dist.distributed import Shard
from neuronx_dist.shard_tensor.attention_method import attention_method

LENGTHS = (4096, 2048)  # of the whole sequence; transport grows with it, compute with its square
HEADS, FEATURES = 8, 64


def step(operands: list[torch.Tensor], grad: Any, blocks: list[list[torch.Tensor]] | None = None) -> None:
    """Attention of the operands, or of each of the blocks, forward and backward."""
    for q, k, v in [operands] if blocks is None else blocks:
        F.scaled_dot_product_attention(q, k, v).backward(grad)
        q.grad = k.grad = v.grad = None


def measure(length: int, quick: bool) -> dict[str, list[float]]:
    """CPU seconds of a step of this process, by variant and round."""
    shape = (1, HEADS, length, FEATURES)
    mesh = distributed.init_device_mesh("cpu", (2,))
    q, k, v = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    shards = [x.chunk(2, 2)[mesh.get_local_rank()].clone().requires_grad_() for x in (q, k, v)]
    blocks = [[shards[0], *(x.chunk(2, 2)[rank].clone().requires_grad_() for x in (k, v))] for rank in range(2)]
    given = [distributed.distribute_tensor(x.requires_grad_(), mesh, [Shard(2)]) for x in (q, k, v)]
    start = torch.ones_like(shards[0])
    grad = distributed.distribute_tensor(torch.ones(shape), mesh, [Shard(2)])

    def by(method: str) -> Callable[[], None]:
        def call() -> None:
            with attention_method(method):
                step(given, grad)

        return call

    variants = {
        "blocks": lambda: step(shards, start, blocks),
        "ring": by("ring"),
        "all_to_all": by("all_to_all"),
        "gather": by("gather"),
        "blocks again": lambda: step(shards, start, blocks),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    quiet()
    for _ in range(3 if quick else 9):
        for name, call in variants.items():
            began = time.process_time()
            call()
            seconds[name].append(time.process_time() - began)
    return seconds


def main() -> None:
    options = parser(__doc__).parse_args()
    heading(f"Ring attention over the compute of its blocks, {HEADS} heads of {FEATURES}, float32")
    ratios = {}
    for length in LENGTHS:
        seconds = on_ranks(measure, 2, length, options.quick)
        ratios[length] = {
            name: median(a / b for a, b in zip(times, seconds["blocks"])) for name, times in seconds.items()
        }
        for name, ratio in ratios[length].items():
            print(f"{length:6} {name:14} {median(seconds[name]) * 1e3:8.1f} ms   {ratio:5.2f} of blocks")
    print(json.dumps({"ratios": ratios}))


if __name__ == "__main__":
    main()

"""Attention over context-parallel ranks beside 1/cp of attention in one process: causal, forward and backward.

Each of two gloo processes has 4096 tokens; one process computes all 8192 by torch's fused kernel. A figure is CPU time
of the process that has most, median of the rounds, in which the variants take turns; "of ideal" is whole / cp / figure.
Beside: gathered keys and values under a mask, as written by hand. torch's experimental context parallel has no kernels
for CPUs.

    python benchmarks/context_parallel.py [--quick]

The last line is JSON: parts of the ideal. Goal: zig-zag ring >= 0.85.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from common import heading, on_ranks, parser, quiet  # first: sets the threads

# isort: split
import torch
import torch.nn.functional as F

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.attention import zigzag_order

RANKS, TOKENS, HEADS, FEATURES = 2, 4096, 8, 64


def gathered(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Returns attention to gathered keys and values, of a contiguous part, under a mask."""
    k, v = (spmd.all_gather(x, "cp", src=spmd.S(2), dst=spmd.R) for x in (k, v))
    rows = torch.arange(q.shape[2]) + int(comm.rank("cp")) * q.shape[2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=rows[:, None] >= torch.arange(k.shape[2]))


def measure(quick: bool) -> dict[str, float]:
    """CPU seconds of a step by variant: of the process that has most."""
    nxd.initialize_model_parallel(context_parallel_size=RANKS)
    rank = int(comm.rank("cp"))
    shape = (1, HEADS, RANKS * TOKENS, FEATURES)
    whole = [torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    places = zigzag_order(RANKS * TOKENS, RANKS).chunk(RANKS)[rank]
    contiguous = [x.chunk(RANKS, 2)[rank].clone().requires_grad_() for x in whole]
    zigzag = [x[:, :, places].requires_grad_() for x in whole]
    whole = [x.requires_grad_() for x in whole]

    def step(function: Callable[..., torch.Tensor], operands: list[torch.Tensor]) -> None:
        function(*operands).sum().backward()
        for x in operands:
            x.grad = None

    variants: dict[str, Callable[[], None]] = {
        "whole": partial(step, partial(F.scaled_dot_product_attention, is_causal=True), whole),
        "ring, zig-zag": partial(step, partial(nxd.ring_attention, balance="zigzag"), zigzag),
        "ring, contiguous": partial(step, nxd.ring_attention, contiguous),
        "ring, window of 1024": partial(step, partial(nxd.ring_attention, balance="zigzag", window=1024), zigzag),
        "ulysses, zig-zag": partial(step, partial(nxd.ulysses_attention, balance="zigzag"), zigzag),
        "ulysses, contiguous": partial(step, nxd.ulysses_attention, contiguous),
        "gather": partial(step, gathered, contiguous),
    }
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for call in variants.values():
        call()
    quiet()
    for _ in range(2 if quick else 7):
        for name, call in variants.items():
            comm.barrier()
            began = time.process_time()
            call()
            used = torch.tensor(time.process_time() - began, dtype=torch.float64)
            seconds[name].append(float(comm.all_reduce(used, "cp", op="max")))
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    options: Any = parser(__doc__).parse_args()
    heading(f"Causal attention of {RANKS} x {TOKENS} tokens, {HEADS} heads of {FEATURES}, float32")
    seconds = on_ranks(measure, RANKS, options.quick)
    ideal = {name: seconds["whole"] / RANKS / value for name, value in seconds.items()}
    for name, value in seconds.items():
        print(f"{name:22} {value * 1e3:8.0f} ms   {ideal[name]:5.2f} of ideal")
    print(json.dumps({"of_ideal": ideal}))


if __name__ == "__main__":
    main()

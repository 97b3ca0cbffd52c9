"""`train_llama.py --verify`: the losses of several layouts beside those of one process, which they must equal."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
import train_llama
from reporting import Report
from text_data import TextData

import neuronx_dist as nxd
from neuronx_dist import Mesh, comm
from neuronx_dist.layout import Layout

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def losses(args: argparse.Namespace, config: Any, data: TextData, device: torch.device) -> list[float]:
    report = Report(args.steps, 1, active=False)
    train_llama.train(args, copy.deepcopy(config), data, device, report)
    return [row["loss"] for row in report.rows]


def layouts(args: argparse.Namespace, config: Any, world: int) -> list[Layout]:
    """Every tp x pp that this world and model allow, each plain, and with sequence parallelism and ZeRO-1 where they do something."""
    found = []
    for tp in (n for n in range(1, world + 1) if world % n == 0):
        for pp in (n for n in range(1, world // tp + 1) if world // tp % n == 0):
            for more in (False, True):
                layout = Layout(
                    world, tp=tp, pp=pp, sequence_parallel=more and tp > 1, zero1=more and world > tp * pp, pad_heads=args.pad_heads,
                    num_microbatches=args.microbatches, global_batch=args.global_batch, seq_len=args.seq_len, dtype=args.dtype,
                )
                if layout not in found and not layout.problems(config):
                    found.append(layout)
    return found


def main(args: argparse.Namespace, config: Any, data: TextData, device: torch.device, asked: Layout) -> int:
    """Prints a row for each layout; 0 if all agree with one process to the tolerance of the dtype."""
    args.steps = min(args.steps, 20)
    rank, world = torch.distributed.get_rank(), asked.world_size
    alone = copy.copy(args)
    alone.tp = alone.pp = 1
    alone.sequence_parallel = alone.zero1 = alone.pad_heads = False
    reference = [comm.threads.run(Mesh(1), losses, alone, config, data, device)[0] if rank == 0 else None]
    torch.distributed.broadcast_object_list(reference, src=0)
    expected = reference[0]
    assert expected is not None
    tolerance, worst = TOLERANCE[args.dtype], 0.0
    if rank == 0:
        print(f"first and last loss over {args.steps} steps in {args.dtype}, and the largest relative difference from one process")
        print(f"{'layout':<42}{'first':>10}{'last':>10}{'difference':>13}")
        print(f"{'one process':<42}{expected[0]:>10.5f}{expected[-1]:>10.5f}")
    for layout in layouts(args, config, world):
        here = copy.copy(args)
        here.tp, here.pp, here.sequence_parallel, here.zero1 = layout.tp, layout.pp, layout.sequence_parallel, layout.zero1
        nxd.initialize_model_parallel(layout.tp, layout.pp)
        found = losses(here, config, data, device)
        nxd.destroy_model_parallel()
        difference = max(abs(a - b) / abs(b) for a, b in zip(found, expected))
        worst = max(worst, difference)
        if rank == 0:
            name = f"tp {layout.tp} × pp {layout.pp} × dp {layout.dp}"
            name += " + sequence parallel" * layout.sequence_parallel + " + ZeRO-1" * layout.zero1
            verdict = "" if difference <= tolerance else f"  more than {tolerance:g}"
            print(f"{name:<42}{found[0]:>10.5f}{found[-1]:>10.5f}{difference:>13.1e}{verdict}", flush=True)
    if rank == 0:
        print(f"all layouts agree to {tolerance:g}" if worst <= tolerance else f"NOT all layouts agree to {tolerance:g}")
    return 0 if worst <= tolerance else 1

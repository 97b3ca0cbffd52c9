"""`neuronx-dist train --verify`: losses of several layouts beside those of one process, which they must equal."""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch

from .. import comm
from ..comm import launch, threads
from ..comm.rank_selection import XLA
from ..mesh import Mesh
from ..parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel
from .causal_lm import build
from .flags import layout_of
from .loop import train
from .progress import Progress
from .text_stream import TextStream

__all__ = ["compare_layouts"]

_TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
_MUON_TOLERANCE = 1e-4  # its iterations round to bfloat16, where a last bit of a gradient may become one of bfloat16


def _losses(args: argparse.Namespace, config: Any, data: TextStream, device: torch.device) -> list[float]:
    progress = Progress(args.steps, 1, active=False)
    train(args, build(args, copy.deepcopy(config), device), data, device, progress)
    return [row["loss"] for row in progress.rows]


def _variants(args: argparse.Namespace, config: Any, world: int, device: torch.device) -> list[argparse.Namespace]:
    """Flags of every tp x pp x cp or ep that world and model allow: as asked for, and with more.

    More are SP and ZeRO-1 where they act and, not on XLA, the fused loss where the model has one and recomputed layers.
    """
    flags = []
    extra: dict[str, Any] = {} if device.type == XLA else dict(fused_loss=args.fused_loss or None)
    if extra and args.recompute == "none":
        extra["recompute"] = "full"
    for tp in (n for n in range(1, world + 1) if world % n == 0):
        for pp in (n for n in range(1, world // tp + 1) if world // tp % n == 0):
            data = world // (tp * pp)
            degrees = [n for n in range(1, data + 1) if data % n == 0]
            for cp, ep in ((cp, ep) for cp in degrees for ep in degrees if cp == 1 or ep == 1):
                for more in (False, True):
                    split = dict(tp=tp, pp=pp, cp=cp, ep=ep, sequence_parallel=more and tp > 1, zero1=more and data > 1)
                    here = argparse.Namespace(**{**vars(args), **split, **(extra if more else {})})
                    if here not in flags and not layout_of(here, world).problems(config):
                        flags.append(here)
    return flags


def compare_layouts(args: argparse.Namespace, config: Any, data: TextStream, device: torch.device) -> int:
    """Prints a row for each layout; 0 if all agree with one process to the tolerance of the dtype."""
    args.steps = min(args.steps, 20)
    world, rank = launch.world()
    say = print if rank == 0 else lambda *_, **__: None
    single: dict[str, Any] = dict(tp=1, pp=1, cp=1, ep=1, schedule=None, virtual_pipeline_size=1)
    single |= dict(sequence_parallel=False, zero1=False, pad_heads=False, pad_vocab=False, fused_loss=False)
    single |= dict(recompute="none", memory=None, offload=False)
    alone = argparse.Namespace(**{**vars(args), **single})
    # On XLA devices the one process computes on the CPU, which is a reference for them too.
    reference_device = device if device.type in ("cpu", "cuda") else torch.device("cpu")
    initialize_model_parallel()
    mine = threads.run(Mesh(1), _losses, alone, config, data, reference_device)[0] if rank == 0 else None
    expected: list[float] = comm.broadcast_object(mine)
    destroy_model_parallel()
    tolerance, worst = max(_TOLERANCE[args.dtype], _MUON_TOLERANCE if args.optimizer == "muon" else 0.0), 0.0
    say(
        f"losses of {args.steps} steps in {args.dtype}, and their largest relative difference from those of one process"
    )
    say(f"{'layout':<80}{'first':>10}{'last':>10}{'difference':>13}")
    say(f"{'one process':<80}{expected[0]:>10.5f}{expected[-1]:>10.5f}")
    for here in _variants(args, config, world, device):
        sizes = dict(context_parallel_size=here.cp, expert_model_parallel_size=here.ep)
        initialize_model_parallel(here.tp, here.pp, **sizes)
        actual = _losses(here, config, data, device)
        name = f"tp {here.tp} × pp {here.pp} × dp {comm.size('dp')}" + f" (ep {here.ep})" * (here.ep > 1)
        name += f" × cp {here.cp}" * (here.cp > 1)
        destroy_model_parallel()
        name += " + sequence parallel" * here.sequence_parallel + " + ZeRO-1" * here.zero1
        name += " + fused loss" * (here.fused_loss is not False)
        name += f" + recompute {here.recompute}" * (here.recompute != "none")
        difference = max(abs(a - b) / abs(b) for a, b in zip(actual, expected))
        worst = max(worst, difference)
        verdict = "" if difference <= tolerance else f"  more than {tolerance:g}"
        say(f"{name:<80}{actual[0]:>10.5f}{actual[-1]:>10.5f}{difference:>13.1e}{verdict}", flush=True)
    agree = "agree" if worst <= tolerance else "do NOT agree"
    if world == 1:
        say(
            f"these losses on {device.type} {agree} to {tolerance:g}; one process has one layout: for others start "
            "several, as neuronx-dist train --nproc 4 --verify"
        )
    else:
        say(f"all layouts {agree} to {tolerance:g}")
    return 0 if worst <= tolerance else 1

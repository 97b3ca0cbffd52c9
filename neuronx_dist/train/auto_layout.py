"""`--auto`: the layout that `nxd.plan` predicts to be the fastest of those that the other flags allow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from .. import accelerator
from ..planner.cluster import Cluster
from ..planner.plans import plan
from ..planner.presets import PRESETS
from ..planning.layout import format_bytes
from .causal_lm import load_config

__all__ = ["choose_layout", "cluster_of_host"]

# Flags that are constraints where they are given, with their defaults and the planner's names.
_FLAGS: dict[str, tuple[Any, str]] = {
    **{name: (1, name) for name in ("tp", "pp", "cp", "ep", "virtual_pipeline_size")},
    **{name: (False, name) for name in ("sequence_parallel", "zero1", "fused_loss")},
    "microbatches": (4, "num_microbatches"),
    "schedule": (None, "schedule"),
    "recompute": ("none", "recompute"),
}


def choose_layout(args: argparse.Namespace, words: Sequence[str], size: int) -> tuple[str, list[str]]:
    """Sets the flags of the fastest plan; returns why it, in four lines, and the flags as words.

    Raises:
        ValueError: no plan fits, or the device has no preset; the message says what would work.
    """
    if args.check is not None or args.verify:
        raise ValueError("--auto chooses the layout of a run: leave out --check and --verify")
    cluster = cluster_of_host(args.device, size)
    fixed: dict[str, Any] = {"dtype": args.dtype}
    for name, (default, constraint) in _FLAGS.items():
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if value != default or any(word.partition("=")[0] == flag for word in words):
            fixed[constraint] = "" if value == "none" else value
    batch = dict(global_batch=args.global_batch, seq_len=args.seq_len)
    plans = plan(load_config(args)[0], **batch, cluster=cluster, constraints=fixed, top_k=2)
    best = plans[0]
    vars(args).update(best.train_options())
    slower = (
        f"{plans[1].seconds.total / best.seconds.total - 1:+.1%} for {plans[1].words()}" if plans[1:] else "no other"
    )
    bubble = best.seconds.bubble / best.seconds.total
    lines = [
        f"--auto: {best.words()}",
        f"  {best.seconds.total:.4g} s a step by the {cluster.name} preset, MFU {best.mfu:.1%}, {bubble:.1%} waiting",
        f"  {format_bytes(best.peak)} of {format_bytes(cluster.memory)} a device, {best.margin:.0%} left",
        f"  the next one: {slower}",
    ]
    return "\n".join(lines), best.train_flags(batch=False)


def cluster_of_host(device: str, size: int) -> Cluster:
    """Returns the preset of this machine's accelerator, or of the cpu, with so many ranks.

    Raises:
        ValueError: no preset is of this accelerator.
    """
    kind = (accelerator.current_type() or "cpu") if device == "auto" else torch.device(device).type
    if kind == "cpu":
        one = Cluster.preset("cpu")
        return replace(one, devices=size, devices_per_host=size, links=(replace(one.links[0], span=size),))
    name = torch.cuda.get_device_name() if kind == "cuda" else kind
    preset = next((key for key in PRESETS if key.upper() in name.upper().replace("-", " ").split()), None)
    if preset is None:
        raise ValueError(f"--auto has no speeds of {name}: use `neuronx-dist plan measure`, and the flags of its plan")
    return Cluster.preset(preset, size)

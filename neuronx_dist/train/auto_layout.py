"""`--auto`: the layout that `nxd.plan` predicts to be the fastest of those that the other flags allow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from ..planner.cluster import Cluster
from ..planner.plans import plan
from .causal_lm import load_config

__all__ = ["choose_layout"]

# Flags that are constraints where they are given, with their defaults and the planner's names.
_FLAGS: dict[str, tuple[Any, str]] = {
    **{name: (1, name) for name in ("tp", "pp", "cp", "ep", "virtual_pipeline_size")},
    **{name: (False, name) for name in ("sequence_parallel", "zero1", "fused_loss", "overlap")},
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
    cluster = Cluster.of_this_host(size, None if args.device == "auto" else torch.device(args.device).type)
    fixed: dict[str, Any] = {"dtype": args.dtype}
    for name, (default, constraint) in _FLAGS.items():
        flag, value = f"--{name.replace('_', '-')}", getattr(args, name)
        if value != default or any(word.partition("=")[0] == flag for word in words):
            fixed[constraint] = "" if value == "none" else value
    batch = dict(global_batch=args.global_batch, seq_len=args.seq_len)
    # The run checks the programs of all its ranks, before it starts.
    plans = plan(load_config(args)[0], **batch, cluster=cluster, constraints=fixed, top_k=2, check=False)
    best = plans[0]
    vars(args).update(best.train_options())
    return f"--auto: {plans.why()}", best.train_flags(batch=False)

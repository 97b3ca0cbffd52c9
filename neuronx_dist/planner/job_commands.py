"""`neuronx-dist plan measure` and `plan validate`: what runs on the ranks of a job, started by torchrun or alone."""

from __future__ import annotations

import argparse
from typing import Any

from .. import comm
from ..comm.launch import init_distributed
from ..mesh import Mesh
from ..parallel_layers.parallel_state import initialize_model_parallel
from .cluster import Cluster
from .layout_plan import LayoutPlan
from .validation import validate
from .workload import config_of

__all__ = ["measure", "validate_plan"]


def measure(args: argparse.Namespace) -> None:
    """Measures this job's devices and the links of its mesh; rank 0 writes the cluster's file."""
    degrees = {name: (getattr(args, name) or [1])[0] for name in ("tp", "pp", "cp", "ep")}
    _join(**degrees)
    cluster = Cluster.measure(seconds=args.seconds)
    if comm.rank("world") == 0:
        path = args.save or "cluster.json"
        cluster.save(path)
        for name, value in (("products", cluster.flops), ("memory", cluster.bandwidth), ("call", cluster.launch)):
            print(f"{name:10}{_text(name, value)}")
        for link in cluster.links:
            print(
                f"link of {link.span:<4}{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.0f} us, between products "
                f"{link.in_step * 1e6:.0f} us more"
            )
        print(f"saved as {path}")


def validate_plan(args: argparse.Namespace, cluster: Cluster, model: Any) -> None:
    """Trains steps of a saved plan on this job; rank 0 shows and saves prediction and measurement."""
    config = config_of(model) if isinstance(model, str) else getattr(model, "config", model)
    plan = LayoutPlan.load(args.plan, config, cluster)
    layout = plan.layout
    _join(tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep)
    if comm.size("world") != layout.world_size:
        raise ValueError(
            f"the plan {args.plan} is of {layout.world_size} ranks, this job has {comm.size('world')}: run torchrun "
            f"--nproc-per-node {layout.world_size} -m neuronx_dist plan validate ..."
        )
    result = validate(plan, config, steps=args.steps)
    if comm.rank("world") == 0:
        print(result)
        if args.save:
            result.append(args.save)


def _join(*, tp: int, pp: int, cp: int, ep: int) -> Mesh:
    """Joins the job that a launcher started, or a world of one, with these degrees."""
    init_distributed()
    initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
    )
    return comm.current().mesh


def _text(name: str, value: Any) -> str:
    if name == "products":
        return ", ".join(f"{dtype} {speed / 1e12:.3g} TFLOP/s" for dtype, speed in value.items())
    return f"{value / 1e9:.3g} GB/s" if name == "memory" else f"{value * 1e6:.1f} us"

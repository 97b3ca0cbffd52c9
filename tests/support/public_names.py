"""Public names: modules that users import from, and the names of each; for the signatures' test and the site."""

from __future__ import annotations

from typing import Any

__all__ = ["PUBLIC", "WITH_PACKAGES", "public_names"]

PUBLIC = """checking comm comm.launch data distributed hf mesh metrics optimizer parallel_layers parallelize
    parallelize.cli pipeline planner planner.cluster planner.workload planning.layout planning.memory
    planning.plan shard_tensor shard_tensor.experimental shard_tensor.parallel shard_tensor.physicsnemo spmd
    trainer weights.shard_spec modules.lora modules.moe modules.qkv_linear modules.rms_norm
    """.split()
PUBLIC += [
    f"parallel_layers.{name}"
    for name in """checkpointing comm grads layers logprobs mappings model_groups parallel_state random rank_orders
    utils""".split()
]
WITH_PACKAGES = ["lightning"]  # public too; they import packages that a fast test does not load


def public_names(module: Any) -> list[str]:
    """`__all__`, or the functions and classes that a module without it defines."""
    defined = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return getattr(module, "__all__", None) or [name for name in defined if name[0] != "_"]

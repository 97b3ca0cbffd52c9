"""Fused projections of NeuronX Distributed's models, as the separate ones that Hugging Face's models have.

    qkv_proj.weight_q, .weight_k, .weight_v     q_proj.weight, k_proj.weight, v_proj.weight
    qkv_proj.weight_qkv                         the same, one behind the other in each shard
    gate_up_proj.weight                         gate_proj.weight, up_proj.weight, half of each shard

It is done where the model that loads has the separate names, and not the fused one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..weights.shard_spec import ShardSpec

__all__ = ["separated"]


def separated(state: Mapping[str, Any], specs: Mapping[str, ShardSpec], tp: int) -> dict[str, Any]:
    """A rank's state dict with fused projections cut into the model's parameters.

    Args:
        specs: layouts of the parameters of the model that loads.
        tp: over how many ranks it was divided when it was saved.
    """
    result: dict[str, Any] = {}
    for name, value in state.items():
        parts = [] if name in specs else _parts(name)
        if not parts or not all(part in specs for part in parts):
            result[name] = value
            continue
        start = 0
        for part, rows in zip(parts, _rows(value.shape[0], specs[parts[0]].unpadded_shape[0] // tp, len(parts))):
            result[part] = value.rows(start, start + rows)
            start += rows
    return result


def _parts(name: str) -> list[str]:
    """The separate names of a fused projection, in its order; none of anything else."""
    module, _, key = name.rpartition(".")
    path, dot, projection = module.rpartition(".")
    entry, _, letters = key.partition("_")
    if projection == "gate_up_proj" and not letters:
        return [f"{path}{dot}{part}_proj.{entry}" for part in ("gate", "up")]
    if projection == "qkv_proj" and letters in ("q", "k", "v", "qkv"):
        return [f"{path}{dot}{letter}_proj.{entry}" for letter in letters]
    return []


def _rows(total: int, query: int, parts: int) -> list[int]:
    """How many rows each part has; key and value, which several ranks may hold, have half of what query leaves."""
    if parts == 3:
        return [query, (total - query) // 2, (total - query) // 2]
    return [total // parts] * parts

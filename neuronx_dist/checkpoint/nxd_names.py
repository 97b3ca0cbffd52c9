"""Fused projections of NeuronX Distributed's models, as the separate ones that Hugging Face's models have.

    qkv_proj.weight_q, .weight_k, .weight_v     q_proj.weight, k_proj.weight, v_proj.weight
    qkv_proj.weight_qkv, qkv_proj.weight        the same, one behind the other in each shard
    gate_up_proj.weight                         gate_proj.weight, up_proj.weight, half of each shard

It is done where the model that loads has the separate names, and not the fused one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..weights.shard_spec import ShardSpec

__all__ = ["Origin", "separated"]


class Origin(NamedTuple):
    """Where a parameter stood: in which parameter of the file, from which row on."""

    name: str
    start: int = 0


def separated(
    state: Mapping[str, Any], specs: Mapping[str, ShardSpec], tp: int
) -> tuple[dict[str, Any], dict[str, Origin]]:
    """A rank's state dict with fused projections cut into the model's parameters, and where each of these stood.

    Args:
        specs: layouts of the parameters of the model that loads.
        tp: over how many ranks it was divided when it was saved.
    """
    result: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for name, value in state.items():
        parts = [] if name in specs else _parts(name)
        if not parts or not all(part in specs for part in parts):
            result[name], origins[name] = value, Origin(name)
            continue
        start = 0
        for part, rows in zip(parts, _rows(value.shape[0], specs[parts[0]].unpadded_shape[0] // tp, len(parts))):
            result[part], origins[part] = value.rows(start, start + rows), Origin(name, start)
            start += rows
    return result, origins


def _parts(name: str) -> list[str]:
    """The separate names of a fused projection, in its order; none of anything else."""
    module, _, key = name.rpartition(".")
    path, dot, projection = module.rpartition(".")
    entry, _, letters = key.partition("_")
    if projection == "gate_up_proj" and not letters:
        return [f"{path}{dot}{part}_proj.{entry}" for part in ("gate", "up")]
    if projection == "qkv_proj" and letters in ("", "q", "k", "v", "qkv"):
        return [f"{path}{dot}{letter}_proj.{entry}" for letter in letters or "qkv"]
    return []


def _rows(total: int, query: int, parts: int) -> list[int]:
    """How many rows each part has; key and value, which several ranks may hold, have half of what query leaves."""
    if parts == 3:
        return [query, (total - query) // 2, (total - query) // 2]
    return [total // parts] * parts

"""The layout of the tensors of state dicts over ranks, as plain data that is saved with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ... import comm
from ...torch_internals.tensors import state_dict_metadata
from ...weights.shard_spec import ShardSpec, spec_of
from ..config import ComputeConfig

__all__ = ["LAYOUT", "StateLayout", "layout_data", "layout_of", "position_data", "spec_from_data", "specs_data"]

LAYOUT = "parallel_layout"  # key of the layout in a state dict's metadata, and in an optimizer's state dict


@dataclass(frozen=True)
class StateLayout:
    """The layout of the tensors of one rank's state dict.

    Attributes:
        rank: the rank.
        index: index of the shard that it has of sharded tensors.
        unit: number of its unit.
        plan_ngpus, runtime_ngpus: sizes of the job.
        specs: layouts of the sharded tensors, by key; other tensors are whole.
        elsewhere: keys of the whole module that are on other pipeline stages.
    """

    rank: int
    index: int
    unit: int
    plan_ngpus: int
    runtime_ngpus: int
    specs: dict[str, ShardSpec]
    elsewhere: frozenset[str] = frozenset()

    def spec(self, key: str, shape: Sequence[int]) -> ShardSpec:
        """Returns the layout of a tensor whose local shape is `shape`."""
        return self.specs.get(key, ShardSpec(full_shape=tuple(shape)))


def specs_data(named: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Returns the layouts of the sharded parameters among these, as plain data."""
    specs = {name: spec_of(tensor) for name, tensor in named.items()}
    return {name: {**asdict(spec), "full_shape": list(spec.full_shape)} for name, spec in specs.items() if spec.axis}


def spec_from_data(data: Mapping[str, Any]) -> ShardSpec:
    """Returns one layout from plain data of `specs_data`."""
    return ShardSpec(**{**data, "full_shape": tuple(data["full_shape"])})


def position_data(index: int, config: ComputeConfig | None) -> dict[str, int]:
    """Returns the position of this rank in the job, as plain data."""
    here = comm.is_initialized()
    return {
        "rank": int(comm.current().rank) if here else 0,
        "index": index,
        "unit": comm.rank("dp") if here else 0,
        "plan_ngpus": 1 if config is None else config.plan_ngpus,
        "runtime_ngpus": 1 if config is None else config.world_size,
    }


def layout_data(module: nn.Module, index: int, config: ComputeConfig, elsewhere: Sequence[str]) -> dict[str, Any]:
    """Returns the layout of a parallel module's state dict as plain data; `elsewhere`: keys on other stages."""
    named = dict(module.named_parameters(remove_duplicate=False))
    return {**position_data(index, config), "specs": specs_data(named), "elsewhere": list(elsewhere)}


def layout_of(state_dict: Mapping[str, Any]) -> StateLayout:
    """Returns the layout of a module's state dict, of all parallel modules in it.

    Raises:
        ValueError: there is none: the state dict was copied into another dict, or its module has no parallel modules.
    """
    metadata: Mapping[str, Any] = state_dict_metadata(state_dict)
    entries = {prefix: entry[LAYOUT] for prefix, entry in metadata.items() if LAYOUT in entry}
    if not entries:
        raise ValueError(
            "the state dict has no `_metadata`, where the layout of a parallel module is stored: save and pass the "
            "dict that module.state_dict() or deduped_state_dict() returned, not a copy of its items"
        )
    specs = {
        f"{prefix}.{name}" if prefix else name: spec_from_data(data)
        for prefix, entry in entries.items()
        for name, data in entry["specs"].items()
    }
    elsewhere = frozenset(
        f"{prefix}.{name}" if prefix else name for prefix, entry in entries.items() for name in entry["elsewhere"]
    )
    first = next(iter(entries.values()))
    position = {name: first[name] for name in ("rank", "index", "unit", "plan_ngpus", "runtime_ngpus")}
    return StateLayout(**position, specs=specs, elsewhere=elsewhere)

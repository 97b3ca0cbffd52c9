"""One rank's optimizer state: a check that it fits, and its file, written and read by a few ranks at a time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from .. import comm
from .shards import ParameterShard

__all__ = ["check_loadable", "rank_of_shards", "state_path", "turns"]


def check_loadable(optimizer: str, state_dict: dict[str, Any], shards: Sequence[ParameterShard]) -> None:
    """Refuses a state dict that does not fit these shards.

    Args:
        optimizer: name of the class that loads it, for messages.

    Raises:
        ValueError: it is no state dict of such an optimizer, of other parameters, of another sharding degree, or of
            another rank.
    """
    missing = [name for name in ("state", "param_groups", "base_state", "shape_info") if name not in state_dict]
    if missing:
        raise ValueError(f"not a state dict of {optimizer}: it lacks {', '.join(missing)}")
    saved = {index: tuple(shape) for index, shape in state_dict["shape_info"].items()}
    present = {index: tuple(shard.param.shape) for index, shard in enumerate(shards)}
    different = [index for index in sorted({*saved, *present}) if saved.get(index) != present.get(index)]
    if different:
        index = different[0]
        raise ValueError(
            f"the state dict is for other parameters: parameter {index} has shape {saved.get(index)} there and "
            f"{present.get(index)} here ({len(different)} of {len(present)} differ)"
        )
    tensors = {index: list(values.values()) for index, values in state_dict["base_state"].items()}
    for index, master in state_dict.get("sharded_master_weights", {}).items():
        tensors.setdefault(index, []).append(master)
    for index, values in tensors.items():
        shape = shards[index].shape
        for value in values:
            rows_differ = isinstance(value, torch.Tensor) and value.dim() and value.shape[1:] == shape[1:]
            if rows_differ and value.shape[0] != shape[0]:
                raise ValueError(
                    f"the state dict has another sharding degree: shards of parameter {index} have shape "
                    f"{tuple(value.shape)} there and {shape} here; load it in the layout in which it was saved"
                )
    here = rank_of_shards(shards)
    there = state_dict.get("rank_of_shards", here)  # NxD's files have none
    if there != here:
        raise ValueError(
            f"the state dict is of another rank, at {there}, and rank {comm.rank('world')} is at {here}: load what "
            "this rank saved, or save and load by neuronx_dist.save_checkpoint and load_checkpoint, for any layout"
        )


def rank_of_shards(shards: Sequence[ParameterShard]) -> dict[str, Any]:
    """Returns the places of this rank that decide which part of the model's state it has.

    "data": its numbers in the sharding groups, of their sizes; "tp" and "pp": its coordinates.
    """
    numbers = sorted({(shard.group.rank, shard.degree) for shard in shards})
    return {"data": numbers, "tp": comm.rank("tp"), "pp": comm.rank("pp")}


def state_path(output_dir: str | os.PathLike[str]) -> str:
    """This rank's file, with every coordinate in its name.

    Upstream leaves out pp and cp, whose ranks then overwrite each other's files.
    """
    coordinates = [f"{axis}_rank_{comm.rank(axis):02d}" for axis in ("dp", "cp", "tp", "pp")]
    return os.path.join(output_dir, ".".join(["optim", *coordinates]))


def turns(ranks_at_a_time: int) -> list[bool]:
    """Yields, for each turn until all ranks have had one, whether the turn is this rank's."""
    if ranks_at_a_time < 1:
        raise ValueError(f"num_workers_per_step must be at least 1, got {ranks_at_a_time}")
    mine = comm.rank("world") // ranks_at_a_time
    return [turn == mine for turn in range(-(-comm.size("world") // ranks_at_a_time))]

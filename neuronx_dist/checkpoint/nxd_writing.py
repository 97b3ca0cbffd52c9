"""Weights in a folder as NeuronX Distributed writes it: a state dict for each tp and pp rank."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..weights.shard_spec import ShardSpec

__all__ = ["RankedTensor", "write_nxd"]


class RankedTensor(NamedTuple):
    """A whole tensor, and who holds which part of it.

    Attributes:
        names: in the state dict of a pp rank, by its number: a tied weight is on several.
        spec: its layout over tp.
        read: the whole tensor, without padding.
    """

    names: Mapping[int, Sequence[str]]
    spec: ShardSpec
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


def write_nxd(
    tensors: Sequence[RankedTensor], folder: Path, tp: int, pp: int, done: Callable[[int], None] = lambda count: None
) -> None:
    """Writes `model/dp_rank_00_tp_rank_XX_pp_rank_XX.pt`, the marker `checkpoint` first and `done` last.

    The files are laid out first, with holes for the tensors, and then filled through memory maps: one whole tensor is
    in memory at a time.

    Args:
        done: is told after each tensor how many have been written.
    """
    (folder / "model").mkdir(parents=True)
    (folder / "checkpoint").write_text("1")
    paths = {
        (rank, stage): folder / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
        for stage in range(pp)
        for rank in range(tp)
    }
    files = {place: _laid_out(path, tensors, place[1]) for place, path in paths.items()}
    for number, tensor in enumerate(tensors):
        whole = tensor.read()
        for rank in range(tp):
            shard = tensor.spec.local_slice(whole, rank)
            for stage, names in tensor.names.items():
                for name in names:
                    files[rank, stage][name].copy_(shard)
        done(number + 1)
    for path in paths.values():
        with open(path, "rb+") as file:
            os.fsync(file.fileno())
    (folder / "done").write_text("1")


def _laid_out(path: Path, tensors: Sequence[RankedTensor], stage: int) -> dict[str, torch.Tensor]:
    """A file of `torch.save` with room for a rank's tensors, and these, mapped to be written."""
    state = OrderedDict(
        (name, torch.empty(tensor.spec.local_shape, dtype=tensor.dtype))  # memory that nothing touches
        for tensor in tensors
        for name in tensor.names.get(stage, ())
    )
    with torch.serialization.skip_data():
        torch.save(state, path)
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        mapped: dict[str, torch.Tensor] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return mapped

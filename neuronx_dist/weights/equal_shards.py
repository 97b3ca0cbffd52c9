"""Warning of shards of one weight that have equal values on two ranks.

So it is after the state dict of one rank was loaded on all of them without its metadata (a bare dict of tensors, or
`set_model_state_dict(.., broadcast_from_rank0=True)`), or after each rank drew its shard with the same seed: no weight
of one process has these shards, and the ranks may stay copies of one another.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["digest", "warn_if_equal"]

_VALUES = 1 << 16  # of a shard, at most: as many are read


@torch.no_grad()
def digest(shard: torch.Tensor | None) -> int | None:
    """Returns a digest of a shard's values; None for None, and if all values are equal, as with zeros at the start."""
    if shard is None or type(shard.detach()) is not torch.Tensor or shard.is_meta or not shard.numel():
        return None
    # A copy: torch does not resize memory that numpy has seen, which fully_shard does.
    values = shard.detach().flatten()[:_VALUES].to("cpu", torch.float64, copy=True)
    return None if bool((values == values[0]).all()) else zlib.crc32(values.numpy().tobytes())


def warn_if_equal(statements: Mapping[int, Mapping[str, Any]], local_rank: int) -> None:
    """Warns of two ranks whose statements have one digest as their "shard", on the first of them."""
    ranks: dict[int, int] = {}
    for rank, statement in statements.items():
        shard = statement["shard"]
        other = rank if shard is None else ranks.setdefault(shard, rank)
        if local_rank == other != rank:
            warnings.warn(
                f"ranks {other} and {rank} are in one tensor-parallel group, and their shards of a weight have equal "
                "values: was one rank's state dict loaded on both, or a shard drawn on both with one seed? Load by "
                "neuronx_dist.load_checkpoint, or the file that each rank saved; draw weights by init_method=, which "
                "draws the whole weight",
                stacklevel=2,
            )
            return

"""Samples of ranks: units have different samples, and the ranks of one unit the same ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from neuronx_dist import comm, spmd
from neuronx_dist.parallelize import ComputeConfig, parallelize

CONFIG = ComputeConfig(2, 4)


def samples_of(rank: int) -> list[int]:
    units = CONFIG.world_size // CONFIG.plan_ngpus
    return list(DistributedSampler(range(8), units, rank // CONFIG.plan_ngpus))  # type: ignore[arg-type]


@pytest.mark.parametrize("by_unit", [True, False])
def test_inputs_that_differ_in_a_unit_are_found(by_unit: bool, tmp_path: Path) -> None:
    """A DistributedSampler of units gives each unit samples of its own; one of ranks is a mistake that verify finds."""
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def program() -> list[int]:
        rank = int(comm.current().rank)
        parallel = parallelize(nn.Linear(4, 4), {"input": data[:4]}, "tp", CONFIG, gen_savedir=tmp_path)
        chosen = samples_of(rank) if by_unit else samples_of(rank % 2 * CONFIG.plan_ngpus)
        spmd.verify(parallel, {"input": data[chosen]})
        return chosen

    if by_unit:
        chosen = comm.threads.run(CONFIG.mesh(), program)
        assert chosen[0] == chosen[1] and chosen[2] == chosen[3] and sorted(chosen[0] + chosen[2]) == list(range(8))
        return
    with pytest.raises(spmd.SpmdTypeError, match="input"):
        comm.threads.run(CONFIG.mesh(), program)

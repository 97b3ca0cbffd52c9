"""Exchanges of `NeuronXLAStrategy` between ranks, as a case of the tests of mutations."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh


def strategy_collectives() -> None:
    """Compares what `NeuronXLAStrategy` exchanges, on threads."""
    strategies = pytest.importorskip("neuronx_dist.lightning.strategy")

    def main() -> None:
        strategy, rank = strategies.NeuronXLAStrategy(), comm.rank("world")
        assert strategy.reduce(torch.tensor([rank + 1.0]), reduce_op="sum").tolist() == [6.0]
        assert strategy.reduce(rank + 1.0) == 2.0
        assert strategy.broadcast(f"of {rank}", src=1) == "of 1"
        assert strategy.reduce_boolean_decision(rank == 1, all=False)
        assert not strategy.reduce_boolean_decision(rank == 1)

    comm.threads.run(Mesh(3), main)

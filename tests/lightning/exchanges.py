"""Exchanges of the strategies for Lightning and of `hf.Accelerator`, as cases of the tests of mutations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from neuronx_dist import comm, hf
from neuronx_dist.mesh import Mesh


def strategy_collectives() -> None:
    """Compares what the strategies exchange, on threads: NxD's over all ranks, `NxDStrategy` over the data."""
    strategies = pytest.importorskip("neuronx_dist.lightning")
    from neuronx_dist.lightning.nxd_strategy import _gather_over_data as gather_over_data

    def of_nxd() -> None:
        strategy, rank = strategies.NeuronXLAStrategy(), comm.rank("world")
        assert strategy.reduce(torch.tensor([rank + 1.0]), reduce_op="sum").tolist() == [6.0]
        assert strategy.reduce(rank + 1.0) == 2.0
        assert strategy.broadcast(f"of {rank}", src=1) == "of 1"
        assert strategy.reduce_boolean_decision(rank == 1, all=False)
        assert not strategy.reduce_boolean_decision(rank == 1)

    def over_data() -> None:
        strategy, rank = strategies.NxDStrategy(tp=2), comm.rank("world")
        found = [float(strategy.reduce(torch.tensor(rank), reduce_op=op)) for op in ("sum", "mean", "max", "min")]
        assert found == ([2.0, 1.0, 2.0, 0.0] if comm.rank("tp") == 0 else [4.0, 2.0, 3.0, 1.0])
        assert strategy.reduce_boolean_decision(True) and not strategy.reduce_boolean_decision(rank < 3)
        assert strategy.reduce_boolean_decision(rank == 3, all=False)
        assert not strategy.reduce_boolean_decision(False, all=False)
        index = comm.rank("dp")
        states = gather_over_data(torch.full((1 + index, 2 - index), float(index)))
        assert [state.tolist() for state in states] == [[[0.0, 0.0]], [[1.0], [1.0]]]

    comm.threads.run(Mesh(3), of_nxd)
    comm.threads.run(Mesh(4, tp=2), over_data)


def accelerator_collectives() -> None:
    """Compares what `hf.Accelerator` exchanges over the data, on threads."""
    pytest.importorskip("accelerate")

    def main() -> None:
        accelerator, rank = hf.Accelerator.__new__(hf.Accelerator), comm.rank("dp") + 1.0
        accelerator.gradient_state = SimpleNamespace(end_of_dataloader=True, remainder=3)
        assert accelerator.gather({"x": torch.tensor([[rank]])})["x"].tolist() == [[1.0], [2.0]]
        assert accelerator.gather(torch.tensor(rank)).tolist() == [1.0, 2.0]
        assert accelerator.gather_for_metrics([str(rank), "filled"]) == ["1.0", "filled", "2.0"]
        assert accelerator.reduce(torch.tensor([rank])).tolist() == [3.0]
        assert accelerator.reduce([torch.tensor(rank)], "mean", 2.0)[0] == 3.0

    comm.threads.run(Mesh(4, tp=2), main)

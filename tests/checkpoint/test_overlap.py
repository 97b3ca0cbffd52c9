"""Checkpoints directly after a step with `overlap=True`, while its all-gathers are on their way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import LossScaler
from neuronx_dist.parallel_layers import checkpointing
from tests.checkpoint.small_run import Run, equal

SMALL = dict(bucket_cap_mb_all_gather=4e-6, bucket_cap_mb_reduce_scatter=4e-6)  # 4 bytes: each tensor is a bucket
PAIRS = [[0, 1], [2, 3]]
CASES: dict[str, tuple[Mesh, Callable[[], dict[str, Any]]]] = {
    "dp 2": (Mesh(2), dict),
    "tp 2 dp 2": (Mesh(4, tp=2), dict),
    "pairs": (Mesh(4), lambda: dict(sharding_groups=PAIRS)),
    "scaled": (Mesh(2), lambda: dict(loss_scaler=LossScaler(scale=8.0))),
}


def awaited(run: Run) -> int:
    """Parameters whose values are still on their way."""
    return sum(type(param) is not nn.Parameter for param in run.model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_and_a_load_await_the_parameters(tmp_path: Path, case: str, in_background: bool) -> None:
    """Losses, weights and state of a run that saves and loads between steps are those of one without overlap."""
    mesh, options = CASES[case]

    def rank(overlap: bool) -> Any:
        run = Run(overlap=overlap, **SMALL, **options())
        losses = run.train(2)
        if overlap:
            assert awaited(run) == 4
            run.save(tmp_path, "a", async_save=in_background)
        losses += run.train(2)
        if not overlap:
            return losses, run.values()
        assert awaited(run) == 4
        nxd.finalize_checkpoint()
        assert awaited(run) == 4  # nobody has asked for the values

        resumed = Run(seed=1, overlap=True, **SMALL, **options())
        assert resumed.train(3) and awaited(resumed) == 4
        assert resumed.load(tmp_path) == {"step": 2} and not awaited(resumed)
        assert losses[:2] + resumed.train(2) == losses
        run.optimizer.wait()  # type: ignore[attr-defined]
        assert not awaited(run) and awaited(resumed) == 4
        assert equal(resumed.values(), run.values())
        return losses, run.values()

    expected, found = comm.threads.run(mesh, rank, False), comm.threads.run(mesh, rank, True)
    for (losses, values), (other_losses, other_values) in zip(expected, found):
        assert losses == other_losses and equal(values, other_values)


def test_saved_with_overlap_in_pairs_and_loaded_by_another_layout_without(tmp_path: Path) -> None:
    def save() -> list[torch.Tensor]:
        run = Run(overlap=True, sharding_groups=PAIRS, **SMALL)
        run.train(2)
        run.save(tmp_path, "a", async_save=True)
        nxd.finalize_checkpoint()
        return [param.detach().clone() for param in run.model.parameters()]

    saved = comm.threads.run(Mesh(4), save)[0]

    def load() -> None:
        run = Run(seed=1, zero1=False)
        run.load(tmp_path)
        assert equal(run.values()[: len(saved)], saved)

    comm.threads.run(Mesh(1), load)


@pytest.mark.parametrize("write", ["checkpointing", "state_dict"])
def test_other_ways_to_save_await_the_parameters(tmp_path: Path, write: str) -> None:
    def rank(overlap: bool) -> dict[str, torch.Tensor]:
        run = Run(overlap=overlap, **SMALL)
        run.train(2)
        folder = tmp_path / str(overlap)
        if write == "checkpointing":
            checkpointing.save(run.model.state_dict(), str(folder))
            return checkpointing.load(str(folder))
        run.optimizer.save_sharded_state_dict(folder)  # type: ignore[attr-defined]
        assert bool(awaited(run)) == overlap  # the optimizer's state is none of the parameters'
        return {name: value.clone() for name, value in run.model.state_dict().items()}

    expected, found = comm.threads.run(Mesh(2), rank, False), comm.threads.run(Mesh(2), rank, True)
    for one, other in zip(expected, found):
        assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())

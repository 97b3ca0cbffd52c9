"""Checkpoints from several XLA devices: what is written, what is loaded, and what the steps in between compile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from tests.support.paths import ROOT
from tests.support.pool import processes
from tests.xla.programs import saving, training
from tests.xla.training_parity import replayed

MESH = Mesh(4, tp=2)


@pytest.fixture(scope="module")
def states() -> list[dict[str, torch.Tensor]]:
    """Returns the state of each rank of tp 2 x dp 2 after two steps with ZeRO-1."""
    return replayed(MESH, saving.CASE, steps=2).states


@pytest.fixture(scope="module")
def saved(states: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and what each rank had and got."""
    folder = tmp_path_factory.mktemp("xla")
    torch.save(states, folder / "states")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"}
    command = [sys.executable, "-m", "tests.xla.programs.saving", str(folder)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, [torch.load(folder / f"rank_{rank}", weights_only=True) for rank in range(4)]


def test_four_devices_save_and_load(saved: Any, states: Any) -> None:
    """In the same process, and in the background; bit-equal, and each rank's own."""
    _, ranks = saved
    assert {rank["device"] for rank in ranks} == {f"xla:{number}" for number in range(4)}
    for rank, state in zip(ranks, states):
        weights = {name: value for name, value in state.items() if name.startswith("['model']")}
        assert weights and all(torch.equal(rank["before"][name], value) for name, value in weights.items())
        for content, found in rank["found"]:
            assert content == {"step": 2} and found.keys() == rank["before"].keys()
            different = [name for name, value in found.items() if not torch.equal(value, rank["before"][name])]
            assert different == []


def test_ranks_of_the_cpu_load_what_xla_devices_saved(saved: Any, states: Any) -> None:
    folder, _ = saved
    of_ranks = processes(4).run(loaded, str(folder / "run"), mesh=dict(tp=2))
    for held, state in zip(of_ranks, states):
        for name in [name for name in held if name in state and ("model" in name or "exp_avg" in name)]:
            assert torch.equal(held[name], state[name]), name
        assert sum("exp_avg" in name for name in held.keys() & state.keys()) >= 20


def loaded(folder: str) -> dict[str, torch.Tensor]:
    model = training.make_model(saving.CASE, torch.zeros(1))
    optimizer = training.make_optimizer(saving.CASE, model, torch.tensor(0.0))
    nxd.load_checkpoint(folder, "sync", model, optimizer)
    return saving.held(model, optimizer) if comm.size("world") == 4 else {}


def test_saves_between_the_steps_leave_them_one_program() -> None:
    """Saves change no communication of a step with ZeRO-1, and nothing is compiled anew from the second step on."""
    without = replayed(MESH, saving.CASE, steps=4)
    found = replayed(MESH, saving.CASE, steps=4, setup=saving.setup_and_save)
    assert found.compiled == without.compiled == [1, 1, 0, 0]
    assert [program.counts() for program in found.programs] == [program.counts() for program in without.programs]
    assert found.programs[-1].counts()["reduce-scatter", "dp,cp"] == 1

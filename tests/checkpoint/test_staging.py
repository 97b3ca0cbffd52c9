"""A checkpoint holds the state at the time of the call, whatever the run does while it is copied."""

from __future__ import annotations

import copy
import functools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.dcp.staging import StagedCopy, Staging, _Wait, changes_in_step_only
from neuronx_dist.checkpoint.dcp.writing import WritePlan
from neuronx_dist.checkpoint.errors import CheckpointError
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import MasterWeightsOptimizer
from tests.checkpoint.small_run import Run, equal


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies in the background begin when it is set, and at the latest when somebody waits for them."""
    begin = threading.Event()
    finish, wait = Staging.finish, _Wait.__call__

    def later(self: Staging) -> None:
        assert begin.wait(30)
        finish(self)

    def waits(self: _Wait, *args: Any) -> None:
        begin.set()
        wait(self, *args)

    monkeypatch.setattr(Staging, "finish", later)
    monkeypatch.setattr(_Wait, "__call__", waits)
    return begin


@pytest.mark.parametrize("zero1", [False, True])
def test_a_step_waits_for_what_it_changes(tmp_path: Path, late: threading.Event, zero1: bool) -> None:
    def rank() -> None:
        run = Run(zero1=zero1)
        run.train(2)
        values = run.values()
        run.save(tmp_path, "a", async_save=True)
        run.train(1)
        assert late.is_set() and not equal(run.values(), values)
        nxd.finalize_checkpoint()
        other = Run(seed=1, zero1=zero1)
        assert other.load(tmp_path) == {"step": 2}
        assert equal(other.values(), values)
        assert other.train(1) and equal(other.values(), run.values())

    threads.run(Mesh(1), rank)


def test_masters_are_waited_for(tmp_path: Path, late: threading.Event) -> None:
    def rank() -> None:
        model = nn.Linear(8, 8, dtype=torch.bfloat16)
        optimizer = MasterWeightsOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)

        def step() -> None:
            model(torch.ones(1, 8, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        nxd.save_checkpoint(tmp_path, "a", model, optimizer, async_save=True)
        step()
        assert late.is_set()
        after = [param.detach().clone() for param in model.parameters()]
        nxd.load_checkpoint(tmp_path, "a", model, optimizer)
        step()
        assert all(map(torch.equal, after, model.parameters()))

    threads.run(Mesh(1), rank)


def test_what_changes_without_a_step_is_copied_at_once(tmp_path: Path, late: threading.Event) -> None:
    """Buffers, weights that the optimizer does not have, and all weights where no optimizer is given."""

    def rank() -> None:
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        for number, given in enumerate((optimizer, None)):
            late.clear()
            expected = {name: value.clone() for name, value in model.state_dict().items()}
            nxd.save_checkpoint(tmp_path, str(number), model, given, async_save=True)
            model(torch.randn(3, 4))
            with torch.no_grad():
                for param in model[0 if given else slice(None)].parameters():
                    param.add_(1)
            late.set()
            nxd.finalize_checkpoint()
            nxd.load_checkpoint(tmp_path, str(number), model)
            assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

    threads.run(Mesh(1), rank)


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("part", ["model", "layer", "optimizer"])
def test_load_state_dict_waits_for_what_it_changes(
    tmp_path: Path, late: threading.Event, part: str, zero1: bool
) -> None:
    def rank() -> None:
        run, other = Run(zero1=zero1), Run(seed=1, zero1=zero1)
        run.train(2)
        other.train(1)
        values = run.values()
        run.save(tmp_path, "a", async_save=True)
        if part == "optimizer":
            run.optimizer.load_state_dict(other.optimizer.state_dict())
        else:
            names = ("model", "up") if part == "layer" else ("model",)
            target, source = (functools.reduce(getattr, names, state) for state in (run, other))
            target.load_state_dict(source.state_dict())
        assert late.is_set() and not equal(run.values(), values)
        nxd.finalize_checkpoint()
        assert run.load(tmp_path) == {"step": 2} and equal(run.values(), values)

    threads.run(Mesh(1), rank)


def test_a_copy_of_a_model_that_is_being_saved_waits_for_nothing(tmp_path: Path, late: threading.Event) -> None:
    """The copy has the hooks of the model, also after the save."""

    def rank() -> None:
        run = Run()
        run.save(tmp_path, "a", async_save=True)
        copied = copy.deepcopy(run.model)
        assert list(map(len, _hooks(run.model))) == list(map(len, _hooks(copied))) == [1] * 3
        late.set()
        copied.load_state_dict(run.model.state_dict())
        nxd.finalize_checkpoint()
        assert not any(_hooks(run.model))

    threads.run(Mesh(1), rank)


def _hooks(model: nn.Module) -> list[Any]:
    return [module._load_state_dict_pre_hooks for module in model.modules()]


@pytest.mark.parametrize("change", ["weights", "state"])
def test_a_change_by_something_else_is_an_error_on_all_ranks(
    tmp_path: Path, late: threading.Event, change: str
) -> None:
    def rank() -> None:
        run = Run(zero1=False)
        run.train()
        run.save(tmp_path, "a")
        run.save(tmp_path, "b", async_save=True)
        if comm.rank("world") == 1:
            params = list(run.model.parameters())
            with torch.no_grad():
                for param in params:
                    (param if change == "weights" else run.optimizer.state[param]["exp_avg"]).add_(1)
        comm.barrier()
        late.set()
        with pytest.raises(CheckpointError, match=r"rank 1: .*\d tensors .* modified .* by something other"):
            nxd.finalize_checkpoint()
        run.train()
        assert Run(zero1=False).load(tmp_path) == {"step": 1}

    threads.run(Mesh(2), rank)
    assert sorted(os.listdir(tmp_path)) == ["a"]


def test_a_save_that_could_not_begin_lets_the_optimizer_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has staged its tensors by then."""
    stage = WritePlan.stage

    def fails(self: Any, *args: Any) -> Any:
        if comm.rank("world") == 1:
            raise MemoryError("no memory")
        return stage(self, *args)

    def rank() -> None:
        run = Run()
        run.train()
        with pytest.raises(CheckpointError, match="rank 1: MemoryError"):
            run.save(tmp_path, "a", async_save=True)
        run.train()

    monkeypatch.setattr(WritePlan, "stage", fails)
    threads.run(Mesh(2), rank)


def test_a_step_after_the_copies_does_not_wait_and_asks_no_more(tmp_path: Path) -> None:
    def rank() -> None:
        run = Run(zero1=False)
        for tag in ("a", "b"):
            run.save(tmp_path, tag, async_save=True)
            run.train()
        assert len(run.optimizer._optimizer_step_pre_hooks) == 1
        nxd.finalize_checkpoint()
        assert not run.optimizer._optimizer_step_pre_hooks

    threads.run(Mesh(1), rank)


def test_which_tensors_are_copied_later() -> None:
    weight, other = torch.zeros(4, 4), torch.zeros(4)
    storages = {weight.untyped_storage().data_ptr()}
    assert changes_in_step_only(weight, storages) and changes_in_step_only(weight.view(-1)[3:5], storages)
    assert not changes_in_step_only(other, storages)
    with torch.inference_mode():
        inference = torch.zeros(2)
    assert not changes_in_step_only(inference, {inference.untyped_storage().data_ptr()})


def test_an_optimizer_that_never_steps_is_not_hooked() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    staging = Staging(torch.zeros(4), [], optimizer)
    assert not optimizer._optimizer_step_pre_hooks
    staging.finish()
    staging = Staging(torch.zeros(4), [StagedCopy(torch.zeros(2), torch.ones(2))], optimizer)
    staging.close()
    optimizer.step()

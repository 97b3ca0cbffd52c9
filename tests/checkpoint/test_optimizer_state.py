"""Optimizer state that a checkpoint saves, and state that it refuses before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.checkpoint.errors import CheckpointError, CheckpointMismatch
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import LossScaler, MuonAdamW

AdamW, SGD = torch.optim.AdamW, torch.optim.SGD


def on_ranks(function: Callable[[], Any], ranks: int = 2) -> list[Any]:
    return comm.threads.run(Mesh(ranks), function, timeout=10)


def trained(make: Callable[..., torch.optim.Optimizer], steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.copy_(torch.linspace(-1, 1, param.numel()).view(param.shape) + index)
    optimizer = make(model.parameters())
    step(model, optimizer, steps)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()
        nxd.reduce_gradients(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize(
    "saved, loaded, message",
    [
        (partial(AdamW, lr=0.1), partial(SGD, lr=0.1), "the options amsgrad, betas, .* where SGD has dampening, momen"),
        (partial(SGD, lr=0.1, momentum=0.9), partial(AdamW, lr=0.1), "dampening, momentum, .* where AdamW has amsgrad"),
        (partial(torch.optim.Adam), partial(torch.optim.NAdam), "where NAdam has momentum_decay"),
    ],
)
def test_an_optimizer_of_another_class_is_refused_before_anything_changes(
    tmp_path: Path, saved: Any, loaded: Any, message: str, zero1: bool
) -> None:
    def make(factory: Any) -> Any:
        return partial(nxd.NeuronZero1Optimizer, optimizer_class=factory) if zero1 else factory

    def rank() -> None:
        nxd.save_checkpoint(tmp_path, "a", *trained(make(saved)))
        model, optimizer = trained(make(loaded), steps=0)
        before = [param.detach().clone() for param in model.parameters()]
        with pytest.raises(CheckpointMismatch, match=f"was not loaded|{message}") as error:
            nxd.load_checkpoint(tmp_path, "a", model, optimizer)
        assert "of another optimizer class" in str(error.value)
        assert all(map(torch.equal, before, model.parameters()))
        step(model, optimizer)

    on_ranks(rank)


def with_muon(params: Any) -> torch.optim.Optimizer:
    by_dims: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param in params:
        by_dims[param.dim() == 2].append(param)
    groups = [{"params": by_dims[True], "optimizer": "muon"}, {"params": by_dims[False], "optimizer": "adamw"}]
    return nxd.NeuronZero1Optimizer(groups, MuonAdamW, lr=0.1)


def test_a_state_without_momentum_of_muon_is_refused(tmp_path: Path) -> None:
    """One group of AdamW has the options of both groups of MuonAdamW, and torch would load any entries."""

    def rank() -> None:
        nxd.save_checkpoint(tmp_path, "a", *trained(AdamW))
        model, optimizer = trained(with_muon, steps=0)
        message = "was not loaded|of another optimizer class: the state is of AdamW, .* the optimizer is MuonAdamW"
        with pytest.raises(CheckpointMismatch, match=message):
            nxd.load_checkpoint(tmp_path, "a", model, optimizer)

    on_ranks(rank)


@pytest.mark.parametrize("saved", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize("loaded", [False, True], ids=["plain", "zero1"])
def test_state_of_frozen_parameters_that_only_some_optimizers_have(tmp_path: Path, saved: bool, loaded: bool) -> None:
    """Adagrad makes state of all parameters when it is made; ZeRO-1 leaves frozen ones alone."""

    def make(zero1: bool) -> Any:
        factory = partial(torch.optim.Adagrad, lr=0.1)

        def of(params: Any) -> torch.optim.Optimizer:
            params = list(params)
            params[0].requires_grad_(False)
            return nxd.NeuronZero1Optimizer(params, factory, grad_clipping=False) if zero1 else factory(params)

        return of

    def rank() -> None:
        model, optimizer = trained(make(saved))
        nxd.save_checkpoint(tmp_path, "a", model, optimizer)
        other, resumed = trained(make(loaded), steps=0)
        nxd.load_checkpoint(tmp_path, "a", other, resumed)
        other[0].weight.requires_grad_(False)
        step(model, optimizer)
        step(other, resumed)
        assert all(map(torch.equal, model.parameters(), other.parameters()))

    on_ranks(rank)


@pytest.mark.parametrize("saved", [False, True], ids=["plain", "zero1"])
@pytest.mark.parametrize("loaded", [False, True], ids=["plain", "zero1"])
def test_state_of_a_trained_parameter_that_the_optimizer_lacks_is_an_error(
    tmp_path: Path, saved: bool, loaded: bool
) -> None:
    """An optimizer would go on with half of its state, and save the other half away."""

    def make(zero1: bool, most: int | None) -> Any:
        def of(params: Any) -> torch.optim.Optimizer:
            chosen = list(params)[:most]
            return nxd.NeuronZero1Optimizer(chosen, AdamW, lr=0.1) if zero1 else AdamW(chosen, lr=0.1)

        return of

    def rank() -> None:
        nxd.save_checkpoint(tmp_path, "a", *trained(make(saved, None)))
        model, optimizer = trained(make(loaded, -1), steps=0)
        before = [param.detach().clone() for param in model.parameters()]
        last = [name for name, _ in model.named_parameters()][-1]
        with pytest.raises(CheckpointMismatch, match=rf"optimizer\.state\.{last}\."):
            nxd.load_checkpoint(tmp_path, "a", model, optimizer)
        assert all(map(torch.equal, before, model.parameters()))

    on_ranks(rank)


PAIRS, HALVES, SINGLES = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]


@pytest.mark.parametrize("saved, loaded", [(PAIRS, None), (None, PAIRS), (PAIRS, HALVES), (HALVES, SINGLES)], ids=str)
def test_any_sharding_groups_load_into_any_others(tmp_path: Path, saved: Any, loaded: Any) -> None:
    """Ranks of several groups hold the same rows: one of them writes, all of them read."""

    def make(groups: Any) -> Any:
        return partial(nxd.NeuronZero1Optimizer, optimizer_class=AdamW, lr=0.1, sharding_groups=groups)

    def rank() -> None:
        model, optimizer = trained(make(saved))
        nxd.save_checkpoint(tmp_path, "a", model, optimizer)
        other, resumed = trained(make(loaded), steps=0)
        nxd.load_checkpoint(tmp_path, "a", other, resumed)
        for _ in range(2):
            assert all(map(torch.equal, model.parameters(), other.parameters()))
            step(model, optimizer)
            step(other, resumed)

    on_ranks(rank, 4)


def test_options_that_a_checkpoint_lacks_stay(tmp_path: Path) -> None:
    """A later version of a class has more of them."""

    class Later(SGD):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(params, **options)
            self.defaults["new"] = 7
            for group in self.param_groups:
                group.setdefault("new", 7)

    def rank() -> None:
        nxd.save_checkpoint(tmp_path, "a", *trained(partial(SGD, lr=0.1, momentum=0.5)))
        model, optimizer = trained(partial(Later, lr=1.0), steps=0)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        nxd.load_checkpoint(tmp_path, "a", model, optimizer)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["momentum"], group["new"]) == (0.1, 0.5, 7)

    on_ranks(rank, 1)


@pytest.mark.parametrize("with_scaler", [True, False])
def test_the_loss_scaler_is_part_of_a_run(tmp_path: Path, with_scaler: bool) -> None:
    """Also of one that goes on without it."""

    def make(scaler: LossScaler | None) -> Any:
        return partial(nxd.NeuronZero1Optimizer, optimizer_class=SGD, lr=0.1, loss_scaler=scaler)

    def rank() -> None:
        scaler = LossScaler(1024.0, interval=2)
        nxd.save_checkpoint(tmp_path, "a", *trained(make(scaler), steps=3))
        assert scaler.state_dict() == {"scale": 2048.0, "good_steps": 1}
        other = LossScaler(64.0)
        nxd.load_checkpoint(tmp_path, "a", *trained(make(other if with_scaler else None), steps=0))
        assert other.state_dict() == (scaler if with_scaler else LossScaler(64.0)).state_dict()
        nxd.save_checkpoint(tmp_path, "b", *trained(make(None)))
        nxd.load_checkpoint(tmp_path, "b", *trained(make(other), steps=0))  # the scale stays

    on_ranks(rank)


def test_what_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    def rank() -> None:
        model, optimizer = trained(partial(SGD, lr=0.1))
        if comm.rank("world") == 1:
            optimizer.state[model[0].weight]["history"] = object()  # type: ignore[index]
        message = r"optimizer.state.0.weight.history holds a object that cannot be read back as plain data"
        with pytest.raises((CheckpointError, ValueError), match=message):
            nxd.save_checkpoint(tmp_path, "a", model, optimizer)
        comm.barrier()
        assert not nxd.has_checkpoint(tmp_path)

    on_ranks(rank)


def test_tensors_in_containers_are_refused_where_ranks_have_parts(tmp_path: Path) -> None:
    """Such values would all be rank 0's when they are loaded."""

    class Remembers(SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param].setdefault("history", []).append(param.clone())

    def rank() -> None:
        with pytest.raises(ValueError, match="Remembers has tensors in a list, 'history', for 0.weight, of which"):
            nxd.save_checkpoint(tmp_path, "a", *trained(partial(nxd.NeuronZero1Optimizer, optimizer_class=Remembers)))
        saved = trained(partial(Remembers))
        nxd.save_checkpoint(tmp_path, "b", *saved)
        model, optimizer = trained(partial(Remembers), steps=0)
        nxd.load_checkpoint(tmp_path, "b", model, optimizer)
        expected = saved[1].state[saved[0][0].weight]["history"]  # type: ignore[index]
        assert all(map(torch.equal, optimizer.state[model[0].weight]["history"], expected))  # type: ignore[index]

    on_ranks(rank)


@pytest.mark.parametrize("saved_by, loaded_by", [("zero1", "plain"), ("plain", "zero1"), ("zero1", "zero1")])
def test_parameters_without_elements_and_without_dims(tmp_path: Path, saved_by: str, loaded_by: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty, self.scalar = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(()))
            self.small, self.frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scalar + self.empty.sum() + self.small.sum()) * self.frozen.sum()

    def model_and_optimizer(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Odd()
        zero1 = nxd.NeuronZero1Optimizer
        return model, (zero1(model.parameters(), AdamW) if how == "zero1" else AdamW(model.parameters()))

    def rank() -> None:
        model, optimizer = model_and_optimizer(saved_by)
        step(model, optimizer, 2)
        nxd.save_checkpoint(tmp_path, "a", model, optimizer)
        other = model_and_optimizer(loaded_by)
        nxd.load_checkpoint(tmp_path, "a", *other)
        assert all(map(torch.equal, other[0].parameters(), model.parameters()))
        step(*other)

    on_ranks(rank, 4)

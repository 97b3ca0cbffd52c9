"""`init_on_device`: where parameters and buffers of modules are that are built inside, and in which thread."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import neuronx_dist as nxd

REGISTER = nn.Module.register_parameter


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Parameter(torch.ones(3), requires_grad=False)
        shared.mark = "kept"  # type: ignore[attr-defined]
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3)
        self.first.extra, self.second.extra = shared, shared
        self.second.weight = self.first.weight
        self.register_parameter("missing", None)
        self.register_buffer("positions", torch.arange(4))


def test_parameters_alone() -> None:
    with nxd.init_on_device("meta"):
        model = WithBuffer()
    assert all(param.is_meta for param in model.parameters()) and model.positions.tolist() == [0, 1, 2, 3]
    assert model.first.weight is model.second.weight and model.missing is None
    assert model.first.extra is model.second.extra
    assert model.first.extra.mark == "kept" and not model.first.extra.requires_grad
    assert model.second.bias.requires_grad
    assert nn.Module.register_parameter is REGISTER and not nn.Linear(1, 1).weight.is_meta


def test_buffers_too() -> None:
    with nxd.init_on_device(torch.device("meta"), include_buffers=True):
        model = WithBuffer()
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))


def test_it_is_of_this_thread_and_the_innermost_counts() -> None:
    elsewhere: list[nn.Module] = []
    with nxd.init_on_device("meta"):
        with nxd.init_on_device("cpu"):
            assert not nn.Linear(1, 1).weight.is_meta
        thread = threading.Thread(target=lambda: elsewhere.append(nn.Linear(1, 1)))
        thread.start()
        thread.join()
        assert nn.Linear(1, 1).weight.is_meta
    assert not elsewhere[0].weight.is_meta  # type: ignore[union-attr]


def test_what_others_put_in_place_of_torchs_own_is_used_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        names.append(name)
        REGISTER(module, name, param)

    monkeypatch.setattr(nn.Module, "register_parameter", register)
    with nxd.init_on_device("meta"), nxd.init_on_device("meta"):
        nn.Linear(1, 1)
    assert names == ["weight", "bias"] and nn.Module.register_parameter is register

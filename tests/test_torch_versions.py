"""The warning of a torch that is newer than all versions that the tests ran on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from neuronx_dist import comm, spmd
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline.run.halves import divide
from neuronx_dist.program.recorder import record
from neuronx_dist.torch_internals import versions
from neuronx_dist.torch_internals.versions import TESTED, release, warn_if_untested


def check() -> None:
    with comm.as_rank(Mesh(1), 0), spmd.SpmdTypeMode():
        pass


def split_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    edge: Any = get_gradient_edge(x)
    divide([get_gradient_edge((2 * x).sum())], [None], [edge])


def record_forward() -> None:
    with comm.as_rank(Mesh(1), 0):
        record(nn.Linear(2, 2), {"input": torch.ones(1, 2)})


FEATURES: dict[str, Callable[[], None]] = {
    "the type checker": check,
    "a backward pass in two halves": split_backward,
    "the recorder of forwards": record_forward,
}


@pytest.fixture(autouse=True)
def not_yet_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_warned", False)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_first_use_warns_once(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.16.0+cpu")
    with pytest.warns(UserWarning, match=rf"torch 2\.16\.0\+cpu is newer .*2\.15\), and {feature} depends on private"):
        FEATURES[feature]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use in FEATURES.values():
            use()


@pytest.mark.parametrize("version", [*TESTED, "2.13.1+cpu", "2.15.9", "2.14.0a0+git12ab"])
def test_no_warning_of_a_version_that_is_not_newer(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("the type checker")


@pytest.mark.parametrize("version", ["2.16.0", "2.100.0", "3.0.0a0+git12ab"])
def test_versions_are_compared_as_numbers(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.warns(UserWarning, match="is newer than all"):
        warn_if_untested("the type checker")


def test_tested_versions_are_in_order() -> None:
    assert sorted(TESTED, key=release) == list(TESTED)

"""Checks of steps that accumulate gradients or recompute activations: clean, or refused if nobody reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import neuronx_dist as nxd
from neuronx_dist import spmd
from tests.support.nxd_order import Stack, batch, build_model

pytestmark = pytest.mark.slow

MESH = {"pp": 2, "tp": 2, "dp": 2}
PLAIN = {"tp": 2, "dp": 2}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def stack() -> Any:
    with torch.device("meta"):
        return Stack()


def pipeline() -> Any:
    return build_model("")


def recomputing() -> Any:
    model = build_model("")
    nxd.recompute(model)
    return model


def calls(model: Any, optimizer: Any, inputs: Any) -> None:
    with model.no_sync():
        model.run_train(**inputs)
    model.run_train(**inputs)
    optimizer.step()


def calls_without_the_last(model: Any, optimizer: Any, inputs: Any) -> None:
    with model.no_sync():
        model.run_train(**inputs)
        model.run_train(**inputs)
    optimizer.step()


def backwards(model: Any, optimizer: Any, inputs: Any) -> None:
    with nxd.no_sync(model):
        model(**inputs).backward()
        nxd.reduce_gradients(model)
    model(**inputs).backward()
    nxd.reduce_gradients(model)
    optimizer.step()


def backwards_without_the_last(model: Any, optimizer: Any, inputs: Any) -> None:
    with nxd.no_sync(model):
        model(**inputs).backward()
        nxd.reduce_gradients(model)
    optimizer.step()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "build,mesh,step,refused",
    [
        (pipeline, MESH, calls, False),
        (recomputing, MESH, calls, False),
        (pipeline, MESH, calls_without_the_last, True),
        (stack, PLAIN, backwards, False),
        (stack, PLAIN, backwards_without_the_last, True),
    ],
)
def test_the_last_of_several_reduces(build: Callable[[], Any], mesh: Any, step: Any, refused: bool) -> None:
    report = spmd.check(build, batch(), mesh=mesh, optimizer=sgd, step=step)
    assert report.ok != refused, str(report)
    if refused:
        assert "the parts are not added up" in str(report) and "repair: reduce_gradients(model)" in str(report)

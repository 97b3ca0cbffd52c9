"""The check of a step in NxD's order: clean if each reduction is done once, refused if one is missing or doubled."""

from __future__ import annotations

from typing import Any

import pytest

from neuronx_dist import spmd
from neuronx_dist.parallel_layers import grads
from tests.support.nxd_order import batch, build, step

MESHES: list[dict[str, int]] = [{"pp": 2, "dp": 2, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2}]


def check(step: Any, mesh: dict[str, int], wrapper: str = "use_optimizer_wrapper") -> Any:
    types = dict(cp=spmd.S(0)) if "cp" in mesh else {}
    return spmd.check(build, batch(), mesh, step=step, options=dict(wrapper=wrapper), in_types=types)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("wrapper", ["use_optimizer_wrapper", "use_zero1_optimizer", ""])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_order_is_clean(mesh: dict[str, int], wrapper: str) -> None:
    report = check(step, mesh, wrapper)
    assert report.ok, report


@pytest.mark.parametrize("twice", ["cp", "tp", "data"])
def test_a_doubled_reduction_is_refused(twice: str) -> None:
    report = check(lambda *args: step(*args, twice=twice), MESHES[1])
    assert not report.ok and f"second call for '{twice}'" in str(report), report


def test_a_forgotten_mean_is_refused() -> None:
    def without_the_mean(model: Any, optimizer: Any, inputs: Any) -> None:
        model.run_train(**inputs)
        grads.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()

    report = check(without_the_mean, MESHES[0])
    assert not report.ok and 'P("avg")' in str(report) and "dp" in str(report), report

"""`spmd.check` on other rank orders: the verdicts of the linear one, and the ranks that are really concerned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from neuronx_dist import Mesh, spmd
from tests.checking.programs import checked_models as models

pytestmark = pytest.mark.slow

MESHES = [Mesh(8, tp=4, topology=name, ranks_per_node=8) for name in ("trn1", "trn2")]


class Mean(models.MLP):
    """A model whose loss is a mean, which over dp is again one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        return y.square().sum() / y.numel()


def check(mesh: Mesh, defect: str = "", **more):
    return spmd.check(models.model_fn, models.example_inputs(), mesh, options={"defect": defect}, **more)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_right_model_is_ok_and_has_the_values_of_one_process(mesh):
    report = spmd.check(Mean, models.example_inputs(), mesh, numeric=True)
    assert report.ok and report.world_size == 8 and report.programs == 1, str(report)
    assert "loss and 4 gradients equal those of one process" in str(report)


@pytest.mark.each_value
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("sizes", [dict(pp=2), dict(world_size=16, pp=2)], ids=str)
def test_a_pipeline_has_as_many_programs_as_on_the_linear_order(mesh, sizes):
    mesh = replace(mesh, **sizes)
    options = {"zero1": True, "optimizer": True}
    report, linear = (
        spmd.check(models.pipeline, models.pipeline_inputs(), variant, options=options, level=None)
        for variant in (mesh, replace(mesh, topology="linear"))
    )
    assert report.ok, str(report)
    numbers = [(result.programs, result.runs, result.operators, result.collectives) for result in (report, linear)]
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_wrong_message_is_one_between_stages(mesh):
    mesh = replace(mesh, pp=2)
    report = spmd.check(models.pipeline, models.pipeline_inputs(), mesh, options={"defect": "stages"}, level=None)
    assert report.problems and {problem.kind for problem in report.problems} == {"pipeline"}
    for problem in report.problems:
        assert any(set(problem.ranks) <= set(group) for group in mesh.groups("pp")), problem


@pytest.mark.each_value
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("defect", ["missing", "unseen", "order", "verb", "op", "shape", "dtype", "source", "message"])
def test_what_is_wrong_along_tp_is_told_of_ranks_of_one_tp_group(mesh, defect):
    report = check(mesh, defect, level=None)
    assert report.problems
    for problem in report.problems:
        assert any(set(problem.ranks) <= set(group) for group in mesh.groups("tp")), (problem.ranks, problem.message)

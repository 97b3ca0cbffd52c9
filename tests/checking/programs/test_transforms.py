"""torch.vmap, torch.func and scripted functions have the types of plain code."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm, spmd
from tests.checking.programs import transform_programs, whole_steps

NAMES = whole_steps.names_in(transform_programs)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_transformed_functions(name):
    whole_steps.verify(name)


@pytest.mark.parametrize(
    "collective",
    [lambda row: comm.all_reduce(row, "tp"), lambda row: spmd.all_reduce(row, "tp", dst=spmd.R)],
    ids=["verb", "operator"],
)
def test_collectives_inside_of_vmap_are_refused(collective):
    """Backends have no tensor with a hidden dim; and dims of one sample are not those of what is sent."""

    def step(model, optimizer, x):
        rows = spmd.convert(x, "tp", src=spmd.R, dst=spmd.P)
        torch.vmap(collective)(rows)

    report = spmd.check(whole_steps.Net, torch.zeros(4, 4), {"tp": 2}, step=step)
    assert "is inside of torch.vmap" in str(report)

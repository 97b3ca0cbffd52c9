"""Every handler at every layout against one process: values and gradients."""

from __future__ import annotations

import pytest

from tests.shard_tensor.support.cases import MESHES, run_case
from tests.shard_tensor.support.table import CASES


def layouts():
    """Every case on one mesh, in turn, every fourth one of them of two dims; on all meshes with NXD_FULL=1."""
    for number, case in enumerate(CASES):
        for mesh in MESHES:
            runs = mesh == MESHES[number % len(MESHES)]
            yield pytest.param(case, mesh, id=f"{case}-{mesh}", marks=[] if runs else [pytest.mark.full])


@pytest.mark.slow
@pytest.mark.parametrize("case,mesh", layouts())
def test_equals_one_process(case, mesh):
    assert run_case(case, mesh) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",  # every fourth one, whose other run is on a line
    [
        pytest.param(case, id=str(case), marks=[pytest.mark.full] * (number % 4 > 0))
        for number, case in enumerate(CASES)
    ],
)
def test_a_dim_on_two_mesh_dims(case):
    assert run_case(case, (2, 2), most=2, doubled=True) > 0

"""Every handler at every layout against one process: values and gradients."""

from __future__ import annotations

import pytest

from tests.shard_tensor.support.cases import MESHES, run_case
from tests.shard_tensor.support.table import CASES


def layouts():
    """Every case on the mesh of two dims, and on one of one dim, in turn; on all meshes with NXD_FULL=1."""
    lines = [mesh for mesh in MESHES if len(mesh) == 1]
    for number, case in enumerate(CASES):
        for mesh in MESHES:
            runs = len(mesh) > 1 or mesh == lines[number % len(lines)]
            yield pytest.param(case, mesh, id=f"{case}-{mesh}", marks=[] if runs else [pytest.mark.full])


@pytest.mark.slow
@pytest.mark.parametrize("case,mesh", layouts())
def test_equals_one_process(case, mesh):
    assert run_case(case, mesh) > 0

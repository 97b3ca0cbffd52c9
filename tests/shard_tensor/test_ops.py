"""Every handler at every layout against one process: values and gradients."""

from __future__ import annotations

import pytest

from tests.shard_tensor.support.cases import MESHES, run_case
from tests.shard_tensor.support.table import CASES


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case, mesh):
    assert run_case(case, mesh) > 0

"""Every handler at every layout against one process: values and gradients."""

from __future__ import annotations

import pytest

from tests.shard_tensor.support.cases import MARKED_MESHES, run_case
from tests.shard_tensor.support.table import CASES


@pytest.mark.parametrize("mesh", MARKED_MESHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_one_process(case, mesh):
    assert run_case(case, mesh) > 0

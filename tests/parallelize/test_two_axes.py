"""A unit over two axes: the batch (or whatever the first one is chosen for) over one, the weights over the other."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from neuronx_dist.parallelize import ComputeConfig
from tests.parallelize.models import MODELS, model
from tests.parallelize.parity import assert_equal, own_statistics, trained, trained_parallel

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("units", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_parity(name: str, units: int, tmp_path: Path) -> None:
    module, arguments = model(name)
    config = ComputeConfig(4, 4 * units, use_end2end=name == "mlp", pas_config={"tp_size": 2})
    wanted = trained(module, arguments, SGD, 3, units)
    has = trained_parallel(module, arguments, SGD, 3, config, "tp", tmp_path)
    assert_equal(has, own_statistics(wanted, has, units), 1e-10)

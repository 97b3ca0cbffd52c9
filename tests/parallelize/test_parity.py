"""`parallelize` beside one process: losses, every gradient, weights after steps of SGD and AdamW."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist.parallelize import ComputeConfig
from tests.parallelize.hf_models import HF_MODELS, hf_model
from tests.parallelize.models import MODELS, model
from tests.parallelize.parity import assert_equal, own_statistics, trained, trained_parallel

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]  # ranks of a unit, units


def compared(name: str, plan: int, units: int, optimizer: Any, policy: Any, folder: Path, steps: int = 8) -> None:
    module, arguments = model(name)
    config = ComputeConfig(plan, plan * units, use_end2end=name == "mlp")
    wanted = trained(module, arguments, optimizer, steps, units)
    has = trained_parallel(module, arguments, optimizer, steps, config, policy, folder)
    assert_equal(has, own_statistics(wanted, has, units), 1e-9)


@pytest.mark.parametrize("plan, units", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_layouts(name: str, plan: int, units: int, tmp_path: Path) -> None:
    compared(name, plan, units, SGD, "dp" if plan == 1 else "tp", tmp_path)


@pytest.mark.parametrize("policy", ["tp", "data", "autodist"])
@pytest.mark.parametrize("name", MODELS)
def test_policies(name: str, policy: str, tmp_path: Path) -> None:
    compared(name, 2, 1, ADAMW, policy, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("plan, units", [(2, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", HF_MODELS)
def test_hugging_face(name: str, plan: int, units: int, tmp_path: Path) -> None:
    """What they compute in float32 inside (norms, rotary angles) is alike to float32's rounding."""
    module, arguments = hf_model(name)
    wanted = trained(module, arguments, SGD, 3, units)
    has = trained_parallel(module, arguments, SGD, 3, ComputeConfig(plan, plan * units), "tp", tmp_path)
    assert_equal(has, own_statistics(wanted, has, units), 1e-5)

"""Tests of others' code run as in a job: what `initialize_model_parallel` watches there is watched."""

from __future__ import annotations

import pytest

from neuronx_dist.gradients.guards import watch_clipping, watch_optimizers
from neuronx_dist.weights.parametrized import watch_parametrizations


@pytest.fixture(autouse=True)
def _watched() -> None:
    watch_clipping()
    watch_optimizers()
    watch_parametrizations()

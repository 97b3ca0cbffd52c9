"""The tier for one CUDA device, `make test-cuda`: skipped with the reason where there is none.

DEVICE=cpu runs the tier's code on the CPU, which shows that the tests themselves are right, and nothing about CUDA.
"""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = os.environ.get("NXD_CUDA_TIER_DEVICE", "cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        missing = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False")
        for item in items:
            if item.nodeid.startswith("tests/cuda/"):
                item.add_marker(missing)


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE

"""Tests that need torch_xla and jaxlib: `make test-xla` has an environment for them."""

from __future__ import annotations

import importlib.util

import pytest

missing = [name for name in ("torch_xla", "jax") if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if missing else []


@pytest.fixture(autouse=True, scope="session")
def _workers():
    """The lowering and the executing process live as long as the session."""
    yield
    from neuronx_dist import xla_replay

    xla_replay.close()


@pytest.hookimpl(wrapper=True)  # before the fast tier is chosen
def pytest_collection_modifyitems(items):
    """Programs are lowered and executed in processes of their own."""
    for item in items:
        if item.nodeid.startswith("tests/xla/"):
            item.add_marker("process")
    return (yield)

"""Fixtures of all tests: one thread per rank, one pool of worker processes (`support/pool.py`), and the fast tier."""

from __future__ import annotations

import gc
import os
import sys

# Before torch is imported: ranks are the parallelism, here and in every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from tests.support import covering, fast, pool, run_table, versions

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind():
    """A test that leaves a mesh, a job, a recorder or a default dtype behind would change the tests after it."""
    from neuronx_dist.comm import context, recording

    yield
    left = context.default(), recording.recorders, torch.get_default_dtype(), torch.distributed.is_initialized()
    if left[-1]:
        torch.distributed.destroy_process_group()
    context.set_default(None)
    recording.recorders = ()
    torch.set_default_dtype(torch.float32)
    _restore_torch_init()
    assert left == (None, (), torch.float32, False), f"left behind: {left}"


def _restore_torch_init():
    """transformers replaces `torch.nn.init` while it builds a model: two threads that do leave it replaced."""
    transformers = sys.modules.get("transformers.initialization")
    for module in map(sys.modules.get, transformers.TORCH_MODULES_TO_PATCH if transformers else ()):
        for name, function in transformers.TORCH_INIT_FUNCTIONS.items():
            if hasattr(module, name):
                setattr(module, name, function)


pytest_plugins = ["pytester"]


def pytest_addoption(parser):
    parser.addoption("--write-table", metavar="TIER", help="write the README's row for these tests, if all pass")


def pytest_configure(config):
    fast.watch_processes()
    if not hasattr(config, "workerinput"):  # under xdist the session that reports is not one that runs tests
        config.pluginmanager.register(fast.Total())
        if config.option.write_table:
            config.pluginmanager.register(run_table.RunTable(config.option.write_table))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The garbage collector searches none of the modules and tests of a session: they stay until its end.

    Afterwards it runs less often than Python's default: fake tensors, ASTs and graphs are many small objects.
    """
    gc.disable()
    result = yield
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    yield
    covering.mark(metafunc)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    fast.mark(items)
    versions.mark(items)
    if os.environ.get("NXD_FULL") != "1":  # deselected: to skip one takes 5 ms under xdist, and they are 3,000
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with fast.limit(item):
        return (yield)


def pytest_sessionfinish(session, exitstatus):
    pool.shutdown()

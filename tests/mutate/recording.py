"""A plugin of pytest, `-p tests.mutate.recording`: what each test executes, how long it takes, whether it passes."""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.mutate import probes

__all__ = ["Test"]


class Test(NamedTuple):
    """A test as recorded. `hits`: one byte for each block, compressed."""

    __test__ = False  # not one itself

    name: str
    seconds: float
    hits: bytes


_tests: list[Test] = []
_failed: set[str] = set()


def pytest_configure(config: pytest.Config) -> None:
    probes.share(str(os.getpid()))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    hits = probes.hits()
    hits[:] = bytes(len(hits))
    begin = time.monotonic()
    result = yield
    _tests.append(Test(item.nodeid, time.monotonic() - begin, zlib.compress(bytes(hits[:]))))
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if not report.passed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    passed = [test for test in _tests if test.name not in _failed]
    (Path(os.environ["MUTATE_PROBES"]) / f"tests-{os.getpid()}.pickle").write_bytes(pickle.dumps(passed))

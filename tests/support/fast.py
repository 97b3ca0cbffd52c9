"""The tests for every save, `make test-fast`: which they are, and that they stay so.

A test is `fast` unless it is marked `slow`, `process` or `full`. One that names `processes`, `subprocess` or `forked`,
or a function of the tests that does, is marked `process` here; for fixtures that do, the test says so itself. Two
limits hold the tier to its 90 s on two cores, in seconds of CPU, which other load on the machine hardly changes:

    one test     5 s: it fails. A fast test takes less than one, but the first of a session may load what all use.
    all of them  150 s: the session fails, and names the longest.

Both are seconds of the reference machine: on a slower one they are longer by the factor that a fixed piece of work
takes longer there (`slowness`). They hold where the tier runs alone, `make test-fast`. A run of all tests reports the
tier's time and does not fail: whether a commit is right must not depend on how fast a machine is.
"""

from __future__ import annotations

import ast
import inspect
import multiprocessing.process
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

import pytest
import torch

__all__ = ["alone", "limit", "mark", "slowness", "watch_processes", "Total"]

TEST_SECONDS = 5.0
TIER_SECONDS = 150.0
REFERENCE_SECONDS = 0.12  # of CPU, for `_fixed_work` on the reference machine (2 cores, Python 3.11)
_PROPERTY = "cpu seconds in the fast tier"
_STARTERS = {"processes", "subprocess", "forked"}
_started: list[str] = []
_known: dict[FunctionType, bool] = {}


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "function", None)
        if isinstance(function, FunctionType) and _starts_processes(function, set()):
            item.add_marker("process")
        if not any(item.get_closest_marker(name) for name in ("slow", "process", "full")):
            item.add_marker("fast")


def _starts_processes(function: FunctionType, seen: set[FunctionType]) -> bool:
    """Returns whether a test names something that starts processes, or a function of the tests that does."""
    seen.add(function)
    if function in _known:
        return _known[function]
    if not _STARTERS.isdisjoint(function.__code__.co_names):
        return True
    named = (function.__globals__.get(name) for name in function.__code__.co_names)
    found = any(
        isinstance(other, FunctionType)
        and other.__module__.startswith("tests.")
        and other not in seen
        and _starts_processes(other, seen)
        for other in named
    )
    _known[function] = found
    return found


def _fixed_work() -> float:
    """Seconds of CPU for parsing a module of Python's library and for 20,000 products of small tensors."""
    begin = time.process_time()
    for _ in range(3):
        ast.unparse(ast.parse(inspect.getsource(ast)))
    x = torch.ones(8, 8)
    for _ in range(20_000):
        x = x * 1.0
    return time.process_time() - begin


@cache
def slowness() -> float:
    """Factor by which this machine is slower than the reference machine; at least 1."""
    return max(1.0, min(_fixed_work() for _ in range(5)) / REFERENCE_SECONDS)


_LIST_OF_FONTS = "fc-list"  # matplotlib runs it once a machine, in whichever test imports it first


def watch_processes() -> None:
    """Records from now on which processes this one starts."""

    def noted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def start(self: Any, *args: Any, **options: Any) -> Any:
            if not (args and isinstance(args[0], list) and args[0][0] == _LIST_OF_FONTS):
                _started.append(kind.__name__)
            return original(self, *args, **options)

        setattr(kind, name, start)

    noted(subprocess.Popen, "__init__")
    noted(multiprocessing.process.BaseProcess, "start")


def alone(config: pytest.Config) -> bool:
    """Whether only the fast tests were asked for, so that its limits hold."""
    return str(config.option.markexpr) == "fast"


@contextmanager
def limit(item: pytest.Item) -> Iterator[None]:
    """Around a test: it fails if it is in the fast tier and does not belong there."""
    _started.clear()
    begin = time.process_time()
    yield
    seconds = time.process_time() - begin
    if item.get_closest_marker("fast"):
        item.user_properties.append((_PROPERTY, seconds))
        if _started:
            pytest.fail(f"starts a process ({_started[0]}): mark it `process`, which takes it out of the fast tier")
        if seconds > TEST_SECONDS and alone(item.config) and seconds > TEST_SECONDS * slowness():
            pytest.fail(f"takes {seconds:.1f} s of CPU: make it shorter, or mark it `slow`")


class Total:
    """A plugin of the session that reports: what the fast tests took together."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.seconds.update((report.nodeid, value) for name, value in report.user_properties if name == _PROPERTY)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.is_too_long and alone(session.config) and session.exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        if self.seconds:
            terminalreporter.write_line(f"fast tier: {len(self.seconds)} tests, {self.total:.0f} s of CPU")
        if self.is_too_long:
            longest = sorted(self.seconds.items(), key=lambda found: -found[1])[:15]
            failed = "FAILED: " if alone(config) else ""
            terminalreporter.section(
                f"{failed}the fast tier takes more than {TIER_SECONDS * slowness():.0f} s; mark some `slow`"
            )
            for name, seconds in longest:
                terminalreporter.write_line(f"{seconds:6.2f} s  {name}")

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def is_too_long(self) -> bool:
        return self.total > TIER_SECONDS and self.total > TIER_SECONDS * slowness()

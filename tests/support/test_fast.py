"""The fast tier stays fast: what starts a process is found, and what takes long fails."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import fast
from tests.support.pool import processes


def config(marks: str) -> Any:
    """The config of a session of pytest that was started with `-m marks`."""
    return SimpleNamespace(option=SimpleNamespace(markexpr=marks))


def item(*marks: str, of: Any = None) -> Any:
    return SimpleNamespace(
        get_closest_marker=lambda name: name in marks, user_properties=[], config=of or config("fast")
    )


def directly() -> None:
    processes(2)


def through_a_helper() -> None:
    directly()


def neither() -> None:
    item()


def test_tests_that_start_processes_are_found_by_what_they_name() -> None:
    found = [fast._starts_processes(function, set()) for function in (directly, through_a_helper, neither)]  # type: ignore[arg-type]
    assert found == [True, True, False]


@pytest.mark.process
def test_a_fast_test_that_starts_a_process_fails() -> None:
    def start() -> None:
        subprocess.run([sys.executable, "-S", "-c", ""], check=True)

    with pytest.raises(pytest.fail.Exception, match="starts a process"), fast.limit(item("fast")):
        start()
    with fast.limit(item("process")):
        start()


def test_a_fast_test_that_takes_long_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # undone before this test is looked at itself
        patch.setattr(fast, "TEST_SECONDS", -1.0)
        with pytest.raises(pytest.fail.Exception, match="mark it `slow`"), fast.limit(item("fast")):
            pass
        for without_limit in (item("slow"), item("fast", of=config(""))):
            with fast.limit(without_limit):
                pass


@pytest.mark.parametrize("marks", ["fast", ""])
def test_the_session_fails_when_the_tier_runs_alone_and_takes_long(marks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "slowness", lambda: 1.0)
    total = fast.Total()
    for number, seconds in enumerate((fast.TIER_SECONDS, 1.0)):
        session = SimpleNamespace(exitstatus=0, config=config(marks))
        report = SimpleNamespace(when="call", nodeid=str(number), user_properties=[(fast._PROPERTY, seconds)])
        total.pytest_runtest_logreport(report)  # type: ignore[arg-type]
        total.pytest_sessionfinish(session)  # type: ignore[arg-type]
        assert session.exitstatus == (number if marks else 0)


def test_a_slower_machine_has_longer_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    total = fast.Total()
    total.seconds["one"] = 1.5 * fast.TIER_SECONDS
    for factor, is_too_long in ((1.0, True), (2.0, False)):
        monkeypatch.setattr(fast, "slowness", lambda factor=factor: factor)
        assert total.is_too_long is is_too_long
    monkeypatch.undo()
    assert fast.slowness() >= 1.0

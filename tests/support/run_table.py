"""The README's table of what was run where: a session that passes writes its row, `pytest --write-table TIER`.

A row says: the tests of a tier, on a version of torch and of Python, on which day, how many passed. A session with a
failure, or with tests left out by `-k`, writes nothing.
"""

from __future__ import annotations

import datetime
import platform
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.paths import ROOT

__all__ = ["RunTable", "with_row"]

BEGIN, END = "<!-- written by pytest --write-table -->\n", "<!-- end of the table -->\n"
HEAD = "| tests | torch | Python | date | passed | skipped |\n| --- | --- | --- | --- | --- | --- |\n"


class RunTable:
    """A plugin of the session that reports.

    Args:
        tier: name of the tests that are run, as the table shows it.
        file: page with the table.
    """

    def __init__(self, tier: str, file: Path = ROOT / "README.md") -> None:
        self.tier, self.file = tier, file
        self.outcomes: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == 0 and not session.config.option.keyword:
            python = ".".join(platform.python_version_tuple()[:2])
            day = datetime.date.today().isoformat()
            row = [self.tier, torch.__version__.split("+")[0], python, day]
            row += [f"{self.outcomes[name]:,}" for name in ("passed", "skipped")]
            self.file.write_text(with_row(self.file.read_text(), row))


def with_row(page: str, row: list[str]) -> str:
    """Returns the page with a row of its table added, or put in place of the one with equal tests, torch and Python.

    Raises:
        ValueError: the page has no table.
    """
    before, begin, rest = page.partition(BEGIN)
    table, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no table between {BEGIN.strip()} and {END.strip()}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    rows = sorted([*(other for other in rows if other[:3] != row[:3]), row], key=_order)
    lines = "".join(f"| {' | '.join(cells)} |\n" for cells in rows)
    return before + begin + HEAD + lines + end + after


def _order(row: list[str]) -> tuple[str, tuple[int, ...]]:
    return row[0], tuple(int(number) for number in row[1].split("."))

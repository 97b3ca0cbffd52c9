"""The table of what was run where is written row by row, and only the row of a session changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.run_table import BEGIN, END, HEAD, with_row

PAGE = f"before\n{BEGIN}{HEAD}{END}after\n"


def test_rows_are_sorted_and_replaced() -> None:
    page = PAGE
    for row in (["fast", "2.13.0", "3.11", "d", "5", "0"], ["fast", "2.9.0", "3.11", "d", "4", "1"]):
        page = with_row(page, row)
    page = with_row(page, ["fast", "2.13.0", "3.11", "e", "6", "0"])
    rows = page.split(HEAD)[1].split(END)[0].splitlines()
    assert rows == ["| fast | 2.9.0 | 3.11 | d | 4 | 1 |", "| fast | 2.13.0 | 3.11 | e | 6 | 0 |"]
    assert page.startswith("before\n") and page.endswith("after\n")


def test_a_page_without_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table between"):
        with_row("text", ["fast", "2.13.0", "3.11", "d", "5", "0"])


def test_the_readme_has_the_table() -> None:
    page = Path(ROOT / "README.md").read_text()
    assert BEGIN in page and END in page


SESSION = """
from pathlib import Path
def pytest_configure(config):
    from tests.support.run_table import RunTable
    config.pluginmanager.register(RunTable("a tier", Path(PAGE)))
"""


@pytest.mark.parametrize("passes", [True, False])
def test_a_session_writes_its_row_if_it_passes(passes: bool, tmp_path: Path, pytester: pytest.Pytester) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    pytester.makeconftest(SESSION.replace("PAGE", repr(str(page))))
    pytester.makepyfile(f"import pytest\ndef test_one():\n    assert {passes}\ndef test_two():\n    pytest.skip('')")
    pytester.runpytest_inprocess("-p", "no:cacheprovider")
    assert ("| a tier | " in page.read_text()) is passes
    assert not passes or page.read_text().split("|")[-3:-1] == [" 1 ", " 1 "]


THIS = f"PYTHON={sys.executable}"
ENVIRONMENT = ".venv-2.15.0-py{}.{}/bin/python".format(*sys.version_info)


@pytest.mark.process
@pytest.mark.parametrize(
    "arguments, status, words",
    [
        (["VERSION=2.15.0", THIS, "TABLE=1"], 0, ["--write-table 'selection'", f"{ENVIRONMENT} -m pytest"]),
        (["TABLE=1", "ARGS=tests/hf"], 2, ["TABLE=1 writes the row of a whole tier: leave out ARGS=tests/hf"]),
    ],
)
def test_make_test_versions(arguments: list[str], status: int, words: list[str]) -> None:
    """Python that is asked for has an environment of its version; a part of a tier writes no row."""
    command = ["make", "-C", str(ROOT), "--dry-run", "test-versions", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    assert all(word in done.stdout + done.stderr for word in words), done.stdout + done.stderr

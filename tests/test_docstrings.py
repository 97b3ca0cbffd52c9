"""Docstrings begin with one sentence, and are wrapped as a person would: no shape is cut, no word stands alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.sources import tree_of

ROOT = Path(__file__).parents[1]
WIDTH = 120  # columns of a line of source

_QUOTED = re.compile(r"`([^`]*)`")
# A first line begins with a verb ("Returns ...") or its head noun: a reader parses it at first sight.
_CLAUSE = re.compile(
    r"(What|Of|That|Those|These|Where|As|Its|Their|How|Which|Who|When|It|They|One (of|that|who|which)"
    r"|Whether (what|it|its|they|their|that|those|one|all that))\b"
)


def docstrings(tree: ast.Module):
    """(line, column, docstring as it is written) of a module, its classes and its functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                yield first.lineno, first.col_offset, first.value.value


def faults_of_the_head(text: str, column: int):
    if _CLAUSE.match(text):
        yield 0, f"the first line begins with {text.split()[0]!r}, neither a verb nor a noun"


def faults(text: str, column: int):
    """(line within the docstring, what is wrong with it)."""
    lines = text.splitlines() or [""]
    if column + len('"""') + len(lines[0]) > WIDTH:
        yield 0, f"the first line is longer than {WIDTH} columns"
    yield from faults_of_the_head(text, column)
    if len(lines) > 1 and lines[1].strip():
        yield 0, "the first sentence is not a line of its own"
    for match in _QUOTED.finditer(text):
        begin, newline, _ = match[1].partition("\n")
        if newline and begin.count("[") > begin.count("]"):
            yield text[: match.start()].count("\n"), "a shape is broken over two lines"
    for number, (before, line) in enumerate(zip(lines, lines[1:]), 1):
        last = number + 1 == len(lines) or not lines[number + 1].strip()
        begun = before.strip() and before.strip()[-1] not in ".:;|"
        if last and begun and re.fullmatch(r" *[\w'/-]+[.,;]", line) and _indent(before) <= _indent(line):
            yield number, "a word stands alone"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def all_faults(folder: str, faults: Callable[[str, int], Iterator[tuple[int, str]]]) -> list[str]:
    """Every fault of a folder's files as `file:line: what`."""
    return [
        f"{path.relative_to(ROOT)}:{line + offset}: {fault}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, column, text in docstrings(tree_of(path))
        for offset, fault in faults(text, column)
    ]


def test_docstrings_are_written_and_not_only_wrapped() -> None:
    assert all_faults("neuronx_dist", faults) == []


@pytest.mark.parametrize("folder", [pytest.param("tests", marks=pytest.mark.slow), "examples", "benchmarks"])
def test_first_lines_begin_with_a_verb_or_a_noun_in_tests_too(folder: str) -> None:
    assert all_faults(folder, faults_of_the_head) == []


@pytest.mark.parametrize(
    "text, fault",
    [
        ("One sentence.\n\nMore: `[.., n, ..] -> [.., 2 * n, ..]`, and so on.", None),
        ("One.\n\n    a list:\n    word.", None),
        ("A sentence that is broken\nby a machine.", "the first sentence is not a line of its own"),
        ("x" * WIDTH + ".", f"the first line is longer than {WIDTH} columns"),
        ("One.\n\n`[.., n, ..] -> [..,\nn]` is a shape.", "a shape is broken over two lines"),
        ("One.\n\nIt goes on for a line, and then there is one\nword.", "a word stands alone"),
        ("Returns the rank's rows.", None),
        ("Whether a dim is sharded.", None),
        ("What of a dim is of this rank.", "the first line begins with 'What', neither a verb nor a noun"),
        ("Whether it is sharded.", "the first line begins with 'Whether', neither a verb nor a noun"),
    ],
)
def test_what_is_a_fault(text: str, fault: str | None) -> None:
    assert [what for _, what in faults(text, 4)] == ([] if fault is None else [fault])

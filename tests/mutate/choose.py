"""The tests that an edit is run against: those that execute the edited block, by a recording of all tests."""

from __future__ import annotations

import ast
import difflib
import pickle
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tests.mutate.probes import PACKAGE, Block, blocks
from tests.mutate.recording import Test
from tests.support.source_edits import SourceEdit

__all__ = ["Choice", "Recording", "Recordings"]


class Choice(NamedTuple):
    """Tests in the order in which they run, and how many execute the edited block."""

    tests: list[Test]
    executing: int


class Recordings:
    """All recordings of executed blocks: one of all tests, and later ones of tests that are new or have changed."""

    def __init__(self, parts: list[Recording]) -> None:
        self.parts = parts

    @classmethod
    def load(cls, path: Path) -> Recordings:
        return cls([Recording(*part) for part in pickle.loads(path.read_bytes())])

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps([(part.tests, part.bases, part.sources) for part in self.parts]))

    def with_newer(self, newer: Recording) -> Recordings:
        """With the tests of a newer recording, in place of what was known of them and of others in their files."""
        files = {_file(test) for test in newer.tests}
        return Recordings([*(part.only(lambda test: _file(test) not in files) for part in self.parts), newer])

    def existing(self, names: set[str]) -> Recordings:
        """Without the tests that are not among these names: removed or renamed since they were recorded."""
        return Recordings([part.only(lambda test: test.name in names) for part in self.parts])

    @property
    def tests(self) -> list[Test]:
        return [test for part in self.parts for test in part.tests]

    def choose(self, edit: SourceEdit, seconds: float) -> Choice:
        """Tests of `seconds` together: first one case of every test function, those of the edited file's room first."""
        executing = {test for part in self.parts for test in part.executing_block(edit)}
        candidates = executing.union(*(part.others(edit, bool(executing)) for part in self.parts))
        chosen, left = [], seconds
        for test in _in_order(candidates, edit.path):
            if test.seconds <= left or not chosen:
                chosen.append(test)
                left -= test.seconds
        return Choice(chosen, len(executing))


class Recording:
    """Blocks that each test executes. If the package changed since, lines are found by comparing the sources."""

    def __init__(self, tests: list[Test], bases: dict[str, int], sources: dict[str, str]) -> None:
        self.tests, self.bases, self.sources = tests, bases, sources

    def only(self, keep: Callable[[Test], bool]) -> Recording:
        return Recording([test for test in self.tests if keep(test)], self.bases, self.sources)

    @cached_property
    def _hits(self) -> list[bytes]:
        return [zlib.decompress(test.hits) for test in self.tests]

    def executing(self, numbers: Iterable[int]) -> list[Test]:
        """The tests that execute one of these blocks."""
        numbers = list(numbers)
        return [test for test, hits in zip(self.tests, self._hits) if any(hits[number] for number in numbers)]

    # --- from a position to blocks ---

    @cache  # noqa: B019 - there is one recording
    def _blocks(self, path: str) -> list[Block]:
        return blocks(self.sources[path]) if path in self.sources else []

    def _block_at(self, path: str, position: tuple[int, int]) -> int | None:
        """The innermost block around a position, by its number."""
        around = [
            (number, block) for number, block in enumerate(self._blocks(path)) if block.start <= position < block.end
        ]
        return self.bases[path] + max(around, key=lambda pair: pair[1].start)[0] if around else None

    def _blocks_of(self, edit: SourceEdit) -> set[int]:
        tree = ast.parse(edit.source)
        lines = _recorded_lines(self.sources.get(edit.path, ""), edit.source)

        def block(node: ast.AST) -> int | None:
            line: int = node.lineno  # type: ignore[attr-defined]
            return self._block_at(edit.path, (lines[line], node.col_offset)) if line in lines else None  # type: ignore[attr-defined]

        line, column = edit.position
        inside = self._block_at(edit.path, (lines[line], column)) if line in lines else None
        if inside is not None:
            return {inside}
        statement, function = _outermost(tree, edit.position)
        if function is not None:  # its defaults and decorators
            return {number for one in function.body if (number := block(one)) is not None}
        return {number for name in _assigned(statement) for number in self._uses(name)}

    def _is_on_import(self, edit: SourceEdit) -> bool:
        """Returns whether an edit is outside of functions, or before the body of one."""
        tree = ast.parse(edit.source)
        statement, function = _outermost(tree, edit.position)
        return function is None or edit.position < (function.body[0].lineno, function.body[0].col_offset)

    @cache  # noqa: B019 - there is one recording
    def _uses(self, name: str) -> set[int]:
        """The blocks that name something of module or class level."""
        found = set()
        for path, source in self.sources.items():
            if name in source:
                for node in ast.walk(ast.parse(source)):
                    named = (
                        node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
                    )
                    if named == name:
                        found.add(self._block_at(path, (node.lineno, node.col_offset)))  # type: ignore[attr-defined]
        return {number for number in found if number is not None}

    # --- from blocks to tests ---

    def executing_block(self, edit: SourceEdit) -> list[Test]:
        """The tests that execute the edited block."""
        return self.executing(self._blocks_of(edit))

    def others(self, edit: SourceEdit, is_executed: bool) -> set[Test]:
        """More tests, for an edit that is executed on import, or in processes (by no test, as far as is known)."""
        candidates: set[Test] = set()
        base = self.bases.get(edit.path)
        if not is_executed and base is not None:
            candidates.update(self.executing(range(base, base + len(self._blocks(edit.path)))))
        if not is_executed or self._is_on_import(edit):
            candidates.update(test for test in self.tests if _is_near(test, edit.path))
        return candidates


def _file(test: Test) -> str:
    return test.name.partition("::")[0]


def _is_near(test: Test, path: str) -> bool:
    """Whether a test's folder mirrors that of `path`, or is the one of tests of all of the package."""
    folder = PurePosixPath(_file(test)).parent.relative_to("tests")
    return folder in (PurePosixPath(path).parent.relative_to(PACKAGE), PurePosixPath())


def _recorded_lines(before: str, now: str) -> dict[int, int]:
    """Line now -> line before, of those that are equal."""
    if before == now:
        return {line: line for line in range(1, len(now.splitlines()) + 1)}
    matcher = difflib.SequenceMatcher(None, before.splitlines(), now.splitlines(), autojunk=False)
    return {
        match.b + offset + 1: match.a + offset + 1
        for match in matcher.get_matching_blocks()
        for offset in range(match.size)
    }


def _outermost(tree: ast.Module, position: tuple[int, int]) -> tuple[ast.stmt, ast.FunctionDef | None]:
    """The statement of module or class level around a position; and the function, if it is one."""
    body = tree.body
    while True:
        statement = next(one for one in body if _first_line(one) <= position[0] <= (one.end_lineno or 0))
        if isinstance(statement, ast.FunctionDef):
            return statement, statement
        inner = getattr(statement, "body", [])
        if not any(_first_line(one) <= position[0] <= (one.end_lineno or 0) for one in inner):
            return statement, None
        body = inner


def _first_line(statement: ast.stmt) -> int:
    return min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])


def _assigned(statement: ast.stmt) -> Iterator[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id
    if isinstance(statement, ast.ClassDef):
        yield statement.name


def _distance(test: Test, path: str) -> int:
    """Returns the distance of a test's file from the one that mirrors `path`: 0 is that file, 1 its folder, and so on.

    Files of `tests/` itself are about all of the package.
    """
    module = PurePosixPath(path).relative_to(PACKAGE)
    file = PurePosixPath(_file(test)).relative_to("tests")
    room = module.parent
    if file.is_relative_to(room) and file.stem.startswith(f"test_{module.stem}"):
        return 0
    steps = 1
    while not file.is_relative_to(room):
        room, steps = room.parent, steps + 1
    return 1 if len(file.parts) == 1 else steps


def _in_order(tests: set[Test], path: str) -> list[Test]:
    cases: dict[str, list[Test]] = defaultdict(list)
    for test in sorted(tests, key=lambda test: (test.seconds, test.name)):
        cases[test.name.partition("[")[0]].append(test)
    ranked = [(rank, test) for of_one in cases.values() for rank, test in enumerate(of_one)]
    ranked.sort(key=lambda pair: (pair[0].bit_length(), _distance(pair[1], path), pair[1].seconds))
    return [test for _, test in ranked]

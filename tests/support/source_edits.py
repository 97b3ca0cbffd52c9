"""Mutants of source text: an `SourceEdit` replaces one stretch of it, so that the rest of the file stays unchanged.

`tests/mutate` edits the package at random, `tests/parallelize` the calls of collectives in emitted files. Mutants of
calls at run time, which need no source, are those of `call_sites.py`.
"""

from __future__ import annotations

import ast
import difflib
import warnings
from dataclasses import dataclass

__all__ = ["SourceEdit"]


@dataclass(frozen=True)
class SourceEdit:
    """`source[start:end]` of the file at `path` becomes `new`. `position` is (line, column) of the edit."""

    path: str
    operator: str
    source: str
    start: int
    end: int
    new: str
    position: tuple[int, int]

    @property
    def edited(self) -> str:
        return self.source[: self.start] + self.new + self.source[self.end :]

    @property
    def compiles(self) -> bool:
        """Whether Python takes it, and reads something else than before."""
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(self.edited, self.path, "exec", dont_inherit=True)
        except SyntaxError:
            return False
        return ast.dump(ast.parse(self.edited)) != ast.dump(ast.parse(self.source))

    @property
    def diff(self) -> str:
        pair = self.source.splitlines(), self.edited.splitlines()
        return "\n".join(list(difflib.unified_diff(*pair, n=1, lineterm=""))[3:])

    @property
    def changed(self) -> tuple[str, str]:
        """The lines that go and those that come, without indentation: names the edit wherever its line has moved."""
        gone = [line[1:].strip() for line in self.diff.splitlines() if line.startswith("-")]
        come = [line[1:].strip() for line in self.diff.splitlines() if line.startswith("+")]
        return " ".join(gone), " ".join(come)

    @property
    def line(self) -> str:
        """The line in which the edit begins, without indentation."""
        return self.source.splitlines()[self.position[0] - 1].strip()

"""The report of a check: problems, each with ranks and lines, and the extent of the check.

`str(report)` is for people: one line if there are no problems, else the problems; `report.details()` adds what was
assumed, trusted and left out, with lines; `report.to_json()` has all of it for tools, with full paths.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

__all__ = ["Problem", "Report"]


@dataclass(frozen=True)
class Problem:
    """A problem that a check found.

    Attributes:
        kind: "types" (the type rules), "collectives" (ranks whose collectives differ), "pipeline" (stages that do
            not fit), "program" (the model's own code raised), "values" (numbers differ; only with `numeric`).
        message: for people; it names ranks and lines.
        ranks: global ranks that it was found on.
        lines: `file:line`, most important first.
        error: the exception, if there was one.
    """

    kind: str
    message: str
    ranks: tuple[int, ...] = ()
    lines: tuple[str, ...] = ()
    error: BaseException | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "kind": self.kind,
            "message": self.message,
            "ranks": list(self.ranks),
            "lines": list(self.lines),
        }
        if self.error is not None:
            fields["error"] = type(self.error).__name__
        return fields


@dataclass
class Report:
    """The result of `spmd.check`.

    Attributes:
        mesh: sizes of the axes.
        level: "G" (the program equals the unsharded one) or "L" (it is consistent on the ranks); None: types were not
            checked, only programs and collectives compared.
        problems: what is wrong, in the order found.
        operators, collectives: their number in a step of one rank of each stage, summed over the stages.
        programs: how many different programs the ranks run.
        runs: how many ranks were played to find them.
        trusted: declarations that were not proven: "file:line: what".
        assumed: assumptions that the check made: "file:line: what".
        unchecked: axes of size 1, along which ranks cannot differ.
        differences: places where programs of ranks differ in scalars, shapes or calls, without being wrong.
        notes: results of the run with values, in words.
        numeric: whether the step was also run with values.
        finished: False if time ran out before everything was checked.
        seconds: duration of the check.
    """

    mesh: dict[str, int]
    level: str | None = "G"
    problems: list[Problem] = field(default_factory=list)
    operators: int = 0
    collectives: int = 0
    programs: int = 0
    runs: int = 0
    trusted: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numeric: bool = False
    finished: bool = True
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if there are no problems and the check is finished."""
        return not self.problems and self.finished

    @property
    def world_size(self) -> int:
        size = 1
        for axis in ("pp", "dp", "cp", "tp"):
            size *= self.mesh.get(axis, 1)
        return size

    def add(self, problem: Problem) -> None:
        """Adds a problem, unless the report has the same one of another rank."""
        if all((known.kind, known.message) != (problem.kind, problem.message) for known in self.problems):
            self.problems.append(problem)

    def to_json(self, **options: Any) -> str:
        """The report as JSON; `options` go to `json.dumps`."""
        return json.dumps(self.to_dict(), **options)

    def to_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "finished": self.finished,
            "level": self.level,
            "mesh": self.mesh,
            "problems": [problem.to_json() for problem in self.problems],
            "operators": self.operators,
            "collectives": self.collectives,
            "world_size": self.world_size,
            "programs": self.programs,
            "runs": self.runs,
            "trusted": self.trusted,
            "assumed": self.assumed,
            "unchecked_axes": self.unchecked,
            "differences": self.differences,
            "notes": self.notes,
            "numeric": self.numeric,
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        return self.summary()

    def summary(self, details: str = "report.details()", numeric: str = "numeric=True") -> str:
        """The text of `str(report)`: one line if there are no problems, else the problems.

        Args:
            details: the call that lists assumptions and declarations, for the reader.
            numeric: the option that runs the step with values, for the reader.
        """
        return _short_paths(self._ok_line(numeric, details) if self.ok else "\n".join(self._problem_lines(numeric)))

    def details(self, numeric: str = "numeric=True") -> str:
        """The summary, and what was played, assumed, trusted and left out, with lines. `numeric` as in `summary`."""
        lines = [self._ok_line(numeric) if self.ok else "\n".join(self._problem_lines(numeric))]
        covered = f"{self._covered()}; " if self.ok else ""  # the problems end with it
        lines.append(f"  {covered}played in {_count(self.runs, 'run')}, {self.seconds:.1f} s")
        lines += [f"  {note}" for note in self.notes]
        if self.unchecked:
            lines.append(f"  axes of size 1, along which there is nothing to check: {', '.join(self.unchecked)}")
        advice = "" if self.numeric else f"; {numeric} runs it with values at toy size, and compares with one process"
        lines += _listed(self.assumed, f"assumed, not proven{advice}:")
        lines += _listed(self.trusted, "trusted declarations:")
        lines += _listed(self.differences, "what ranks do differently, and may:")
        return _short_paths("\n".join(lines))

    def show(
        self,
        file: TextIO | None = None,
        *,
        details: bool = False,
        hint: str = "report.details()",
        numeric: str = "numeric=True",
    ) -> None:
        """Prints the summary or the details. On a terminal "check ok" is green, unless NO_COLOR is set (no-color.org).

        Args:
            file: None: standard output.
            hint: the call that prints the details, for the reader of the summary.
            numeric: the option that runs the step with values, for the reader.
        """
        file = sys.stdout if file is None else file
        text = self.details(numeric) if details else self.summary(hint, numeric)
        if self.ok and file.isatty() and not os.environ.get("NO_COLOR"):
            first, newline, rest = text.partition("\n")
            text = f"\033[32m{first}\033[0m{newline}{rest}"
        print(text, file=file, flush=True)

    def _ok_line(self, numeric: str, details: str = "") -> str:
        proven = ["gradients"] if self.level else []
        proven.append("collectives")
        if self.mesh.get("pp", 1) > 1:
            proven.append("pipeline messages")
        agree = ", ".join(proven[:-1]) + (" and " if len(proven) > 1 else "") + proven[-1]
        level = f"level {self.level}" if self.level else "types not checked"
        unproven = []
        if self.assumed:
            advice = "" if self.numeric else f" ({numeric} tests with values)"
            unproven.append(_count(len(self.assumed), "assumption") + advice)
        if self.trusted:
            unproven.append(_count(len(self.trusted), "trusted declaration"))
        unproven_text = "; " + ", ".join(unproven) + (f" ({details} lists them)" if details else "") if unproven else ""
        notes = "".join(f"; {note}" for note in self.notes)
        return f"check ok: {_count(self.world_size, 'rank')}, {level}: {agree} agree{notes}{unproven_text}"

    def _problem_lines(self, numeric: str) -> list[str]:
        lines = []
        if self.problems:
            lines.append(f"{_count(len(self.problems), 'problem')} found:")
            lines += [f"\n{number}. {problem.message}" for number, problem in enumerate(self.problems, 1)]
            lines.append("")
        if not self.finished:
            lines.append(f"stopped after {self.seconds:.0f} s, before everything was checked: no verdict on the rest")
        level = f"level {self.level}" if self.level else "types not checked"
        lines.append(f"checked: {self._covered()}, {level}")
        if self.assumed and not self.numeric:
            lines.append(f"{_count(len(self.assumed), 'assumption')}: {numeric} tests with values")
        return lines

    def _covered(self) -> str:
        ranks = _count(self.world_size, "rank")
        programs = f"{ranks} with one program" if self.programs <= 1 else f"{self.programs} programs on {ranks}"
        return f"{_count(self.operators, 'operator')}, {_count(self.collectives, 'collective')}, {programs}"


_PACKAGE = Path(__file__).parent.parent


def _short_paths(text: str) -> str:
    """Paths relative to the current folder where they are below it; paths of this package from its name on."""
    for folder, name in ((_PACKAGE, f"{_PACKAGE.name}/"), (Path.cwd(), "")):
        if folder != folder.parent:
            text = re.sub(rf"(?<![\w./-]){re.escape(str(folder) + os.sep)}", name, text)
    return text


def _listed(entries: Sequence[str], title: str) -> list[str]:
    return [f"  {title}", *(f"    {entry}" for entry in entries)] if entries else []


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

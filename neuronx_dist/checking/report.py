"""What a check found: problems, each with its ranks and lines, and what the check covered."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Problem", "Report"]


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: "types" (the type rules), "collectives" (ranks that do not communicate alike), "pipeline" (stages that do
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
    """The result of `spmd.check`; `str()` of it is one line if all is well.

    Attributes:
        mesh: sizes of the axes.
        level: "G" (the program equals the unsharded one) or "L" (it is consistent on the ranks); None: types were not
            checked, only programs and collectives compared.
        problems: what is wrong, in the order found.
        operators, collectives: that one rank of each stage runs in a step, together.
        programs: how many different programs the ranks run.
        runs: how many ranks were played to find them.
        trusted: declarations that were believed, not proven: "file:line: what".
        assumed: what was taken for granted: "file:line: what".
        unchecked: axes of size 1, along which there is nothing to check.
        differences: where programs of ranks differ in scalars, shapes or calls, and may.
        finished: False if time ran out before everything was checked.
        seconds: that it took.
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
    finished: bool = True
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and everything was looked at."""
        return not self.problems and self.finished

    @property
    def world_size(self) -> int:
        size = 1
        for axis in ("pp", "dp", "cp", "tp"):
            size *= self.mesh.get(axis, 1)
        return size

    def add(self, problem: Problem) -> None:
        """Adds a problem, unless another rank has it already."""
        if all((known.kind, known.message) != (problem.kind, problem.message) for known in self.problems):
            self.problems.append(problem)

    def to_json(self, **options: Any) -> str:
        """All of it, as JSON; `options` go to `json.dumps`."""
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
            "seconds": round(self.seconds, 3),
        }

    def __str__(self) -> str:
        covered = "; ".join([self._programs(), *self._asides()])
        if self.ok:
            return f"ok: {covered}"
        lines = []
        if self.problems:
            lines.append(f"{_count(len(self.problems), 'problem')} found:")
            lines += [f"\n{number}. {problem.message}" for number, problem in enumerate(self.problems, 1)]
            lines.append("")
        if not self.finished:
            lines.append(f"stopped after {self.seconds:.0f} s, before everything was checked: no verdict on the rest")
        return "\n".join([*lines, f"checked: {covered}"])

    def _programs(self) -> str:
        counted = f"{_count(self.operators, 'operator')}, {_count(self.collectives, 'collective')}"
        if self.programs <= 1:
            return f"{counted}, {_count(self.world_size, 'rank')} with one program"
        agree = ", all agree" if self.ok else ""
        return f"{counted}, {self.programs} of {self.world_size} rank programs differ{agree}"

    def _asides(self) -> list[str]:
        asides = []
        if self.trusted:
            asides.append(f"{_count(len(self.trusted), 'trusted declaration')} ({_lines(self.trusted)})")
        if self.assumed:
            asides.append(f"{_count(len(self.assumed), 'assumption')} ({_lines(self.assumed)})")
        if self.unchecked:
            asides.append(f"axes of size 1 not checked: {', '.join(self.unchecked)}")
        asides += self.notes
        asides.append(f"level {self.level}" if self.level else "types not checked")
        return asides


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _lines(entries: Iterable[str]) -> str:
    listed = list(dict.fromkeys(entry.split(": ")[0] for entry in entries))
    shown = ", ".join(listed[:4])
    return f"{shown}, and {len(listed) - 4} more" if len(listed) > 4 else shown

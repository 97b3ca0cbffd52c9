"""Pairs of training programs, a right one and wrong ones, by the class of what they are about.

    @pair("3 maxima", mesh={"tp": 2}, inputs=..., bugs={"not_reduced": "each rank takes the maximum of its shards"})
    def clipped_by_largest_entry(bug):
        ...

registers `clipped_by_largest_entry` and `clipped_by_largest_entry.not_reduced`, as `programs` of
`tests/checking/user_programs` does. A class begins with the number of its item in the list of `test_exam.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.checking.user_programs.support import PROGRAMS, Program, programs

CLASSES: dict[str, str] = {}
"""The class of a program, by the name of the right one."""


def pair(class_: str, **options: Any) -> Callable[[Callable[[str | None], Any]], Any]:
    """Registers a program and its bugs under a class of the exam."""

    def register(make: Callable[[str | None], Any]) -> Any:
        CLASSES[make.__name__] = class_
        return programs(**options)(make)

    return register


def load() -> dict[str, Program]:
    """Registers the programs of all files beside this one, and returns them by name."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in ("support", "__main__") and not path.stem.startswith("test_"):
            import_module(f"tests.checking.exam.{path.stem}")
    return {name: program for name, program in PROGRAMS.items() if name.partition(".")[0] in CLASSES}

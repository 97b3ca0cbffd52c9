"""Hooks on gradients are judged: what they make wrong is refused or assumed with its line, what is right passes."""

from __future__ import annotations

import re

import pytest

from tests.checking.programs import hook_programs, whole_steps

NAMES = [name for name, value in vars(hook_programs).items() if name in whole_steps.PROGRAMS]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_hooks(name):
    program = whole_steps.PROGRAMS[name]
    report, error = whole_steps.check(program), whole_steps.error(program)
    right = not program.refused and not program.assumed
    assert error < 1e-10 if right else error > 1e-3, error
    assert report.ok is not bool(program.refused), str(report)
    if program.refused:
        assert re.search(program.refused, str(report)), str(report)
    elif program.assumed:
        lines = [line for line in report.assumed if program.assumed in line]
        assert lines and lines[0].startswith(hook_programs.__file__), report.assumed
    else:
        assert report.assumed == []

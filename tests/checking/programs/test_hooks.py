"""Hooks on gradients are judged: what they make wrong is refused or assumed with its line, what is right passes."""

from __future__ import annotations

import pytest

from tests.checking.programs import hook_programs, module_hook_programs, whole_steps

NAMES = [*whole_steps.names_in(hook_programs), *whole_steps.names_in(module_hook_programs)]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_hooks(name):
    whole_steps.verify(name)

"""torch.vmap, torch.func and scripted functions have the types of plain code."""

from __future__ import annotations

import pytest

from tests.checking.programs import transform_programs, whole_steps

NAMES = whole_steps.names_in(transform_programs)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_transformed_functions(name):
    whole_steps.verify(name)

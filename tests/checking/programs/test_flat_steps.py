"""ZeRO-1 by hand on a flat buffer: right ones pass, wrong ones are refused or assumed with their line."""

from __future__ import annotations

import pytest

from tests.checking.programs import flat_programs, whole_steps

NAMES = whole_steps.names_in(flat_programs)


@pytest.mark.parametrize("name", NAMES)
def test_a_flat_step(name):
    whole_steps.verify(name)

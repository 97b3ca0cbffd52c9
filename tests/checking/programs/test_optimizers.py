"""Optimizers are judged: those that mix elements of a shard are refused, elementwise ones pass."""

from __future__ import annotations

import pytest

from tests.checking.programs import optimizer_programs, whole_steps

NAMES = whole_steps.names_in(optimizer_programs)


@pytest.mark.parametrize("name", NAMES)
def test_a_step_with_its_optimizer(name):
    whole_steps.verify(name)

"""A rule of the checker that is dropped: the verdict on a program that it decides is another one then."""

from __future__ import annotations

import pytest
import torch

from tests.checking.exam.support import load
from tests.checking.mutation.rules import RULES, dropped, said

APPLY_IN_C = not hasattr(
    torch.autograd.Function.apply, "__func__"
)  # as in torch 2.15: no function bound before is seen


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_a_dropped_rule_changes_a_verdict(name):
    rule = RULES[name]
    if name == "functions bound before" and APPLY_IN_C:
        pytest.skip("torch's apply is in C")
    before = said(rule.program)
    with dropped(rule):
        after = said(rule.program)
    assert after != before and said(rule.program) == before
    if isinstance(rule.program, str) and name != "literal numbers":  # which lists an assumption
        assert before[0] == ("accepted" if load()[rule.program].right else "refused") and after[0] != before[0]

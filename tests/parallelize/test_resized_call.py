"""The arguments of one call at new sizes."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist.checking.types.rules import RULES, Rule, Spec
from neuronx_dist.checking.types.rules.normal_form import normal_form
from neuronx_dist.checking.types.rules.views import Labels
from neuronx_dist.parallelize.congruence import Slot, spec_of
from neuronx_dist.parallelize.program import Call
from neuronx_dist.parallelize.resized_call import ResizedCall, resized_call


def has_no_kernel(x: torch.Tensor, rows: int) -> torch.Tensor:
    raise NotImplementedError


def spec_of_rows(x: torch.Tensor, rows: int) -> Spec:
    if len(x) != rows:
        raise ValueError(f"{len(x)} rows are not {rows}")
    builder = Labels()
    dims = builder.dims(x.shape)
    return builder.spec([dims], [dims])


def test_integers_follow_the_rule_of_a_function_without_a_kernel_for_meta_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rule = Rule("has_no_kernel", spec_of_rows)
    monkeypatch.setitem(RULES, has_no_kernel, rule)
    small = Slot(0, (4, 3), torch.float64, False)
    wanted = normal_form(spec_of(rule, ((torch.empty(4, 3, device="meta"), 4), {})))
    call = Call(has_no_kernel, (), {})
    assert resized_call(call, ((small, 8), {}), wanted, ((4, 3),), ((8, 4),)) == ResizedCall(((small, 4), {}))
    # Nobody knows what it gives: neither its rule nor torch.
    assert resized_call(call, ((small, 8), {}), None, ((4, 3),), ((8, 4),)) == ResizedCall(None)

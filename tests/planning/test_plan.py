"""Plans as files: what is saved is loaded, what is no plan is refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import pytest

from neuronx_dist.parallel_layers.replace import LayerPlan
from neuronx_dist.planning.plan import CallPlan, JobPlan, Plan, PlanError, TensorPlan

PLAN = Plan(
    tp=2,
    pp=2,
    dp=3,
    schedule="gpipe",
    microbatches=4,
    stages=(0, 7),
    recompute=((1, 3),),
    layers=(
        LayerPlan("up", "column", fused_with=("gate",), options={"bias": True}),
        LayerPlan("q", "column", padded_size=64, group=(3, 4)),
    ),
    axes=(1, 2),
    calls=(CallPlan("linear", "up", "S(0) of operand 1"),),
    later_calls=((CallPlan("convert", "", "R"), CallPlan("linear", "up", "R")),),
    parameters={"up.weight": TensorPlan((8, 4), "float32", "S(0)", ("I",))},
    inputs={"x": TensorPlan((2, 4), "float32", "R", ("R",))},
)


def test_saved_and_loaded(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "text, why",
    [
        ("not json", "is no plan: it is not JSON"),
        ("[]", "is no plan: it has no"),
        ('{"format": "other"}', "is no plan: it has no"),
        ('{"format": "neuronx_dist.plan", "version": 99}', "of version 99; this package reads versions 1 to 2"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, why):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=why):
        Plan.load(path)


@pytest.mark.parametrize(
    "edit, why",
    [
        ({"tq": 2}, "is a damaged plan: it has 'tq', which is no key of a plan; nearest: tp"),
        ({"calls": [{"function": "f"}]}, "is a damaged plan: calls has no 'module'. It is "),
        ({"tp": 0}, "tp must be a positive integer, got 0"),
        ({"tp": "2"}, "tp must be a positive integer, got '2'"),
        ({"layers": [{"name": "a", "style": "colum"}]}, "layer a has the unknown style 'colum'; nearest: column"),
        ({"job": {**JobPlan()._asdict(), "cpu": 1}}, "job has 'cpu', which is no key of it; nearest: cp"),
        ({"job": {**JobPlan()._asdict(), "cp": 0}}, "job: cp must be a positive integer, got 0"),
        ({"parameters": None}, "parameters has None, which is no dict"),
        ({"axes": [3, 2]}, "axes=(3, 2) are 6 ranks, and not tp="),
        ({"axes": [PLAN.tp, 1], "later_calls": []}, "later_calls are of 0 axes"),
    ],
)
def test_an_edit_that_makes_no_plan_is_refused(tmp_path, edit, why):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(PLAN.text()), **edit}))
    with pytest.raises(PlanError, match=re.escape(why)):
        Plan.load(path)


def test_no_key_is_left_out(tmp_path):
    """A key that is absent is not read as its default: a plan without dp would be one of dp 1."""
    path, text = tmp_path / "plan.json", replace(PLAN, job=JobPlan(cp=2)).text()
    for name in (field.name for field in fields(Plan)):
        content = json.loads(text)
        del content[name]
        path.write_text(json.dumps(content))
        if name in ("job", "costs"):
            assert getattr(Plan.load(path), name) is None
        else:
            with pytest.raises(PlanError, match=f"damaged plan: it has no '{name}'") as refused:
                Plan.load(path)
            assert name != "dp" or "it has no 'dp', the data-parallel size: add it" in str(refused.value)
    for name in JobPlan._fields:
        content = json.loads(text)
        del content["job"][name]
        path.write_text(json.dumps(content))
        with pytest.raises(PlanError, match=f"damaged plan: job has no '{name}'"):
            Plan.load(path)


def test_a_truncated_file_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(PlanError, match="not JSON"):
        Plan.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    with pytest.raises(TypeError):
        Plan(layers=(LayerPlan("a", "column", options={"dtype": object()}),)).save(path)
    assert Plan.load(path) == PLAN


def test_differences_are_listed_and_many_are_counted():
    given = {"calls": [("linear", "up")], "inputs": {"x": ((2, 4), "float32")}}
    PLAN.check(unit=4, units=3, parameters={"up.weight": ((8, 4), "float32")}, **given)
    with pytest.raises(PlanError, match="up.weight: float32\\[8, 4\\] in the plan, float16\\[8, 5\\] here"):
        PLAN.check(unit=4, units=3, parameters={"up.weight": ((8, 5), "float16")}, **given)
    many = {f"w{i}": ((1,), "float32") for i in range(20)}
    with pytest.raises(PlanError, match="and 13 more"):
        PLAN.check(unit=4, units=3, parameters=many, **given)

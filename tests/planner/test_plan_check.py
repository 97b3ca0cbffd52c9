"""Plans are type-checked before they are shown; one that fails is not, and is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.gradients.in_backward import BackwardReduction
from neuronx_dist.gradients.norm import norm_of
from neuronx_dist.modules.moe import dispatch
from neuronx_dist.planner import plan_check, plans
from neuronx_dist.planner.candidate import Candidate
from neuronx_dist.planner.plan_check import problem_of, small_candidate
from neuronx_dist.planner.workload import workload_of
from neuronx_dist.planning.layout import Layout
from neuronx_dist.planning.plan import PlanError
from tests.support.llama import tiny_llama

JOB: dict[str, Any] = dict(global_batch=8, seq_len=16, cluster="h100", devices=4, top_k=1)


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(plan_check, "_known", {})


def test_no_degree_above_one_becomes_one() -> None:
    workload = workload_of("mixtral-8x7b")
    layout = Layout(1024, tp=4, pp=8, cp=4, ep=8, global_batch=1024, num_microbatches=16, seq_len=8192)
    small = small_candidate(
        Candidate(replace(layout, schedule="interleaved", virtual_pipeline_size=4)), workload
    ).layout
    assert (small.tp, small.pp, small.cp, small.ep, small.dp, small.virtual_pipeline_size) == (2, 2, 2, 2, 2, 2)
    assert not small.problems(workload.shape)
    for tp, kept in ((8, 2), (16, 16)):  # 8 key/value heads, of which 16 ranks have replicas
        assert small_candidate(Candidate(replace(layout, tp=tp)), workload).layout.tp == kept


@pytest.mark.slow
def test_a_plan_that_fails_is_not_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The search is made to propose a tp that divides no heads, and then no other layout."""
    config, original = tiny_llama(), plans.search
    legal = nxd.plan(config, **JOB, constraints={"tp": 2, "pp": 2})
    begun: list[str] = []
    legal.on_check = begun.append
    assert len(legal) == 1 and not legal.refused
    assert len((tmp_path / "cache" / "neuronx_dist" / "checked_plans.txt").read_text().split()) == 1
    assert begun == [legal[0].words()]

    def illegal(*args: Any) -> Any:
        found = original(*args)[0]
        layout = replace(found.candidate.layout, tp=3, pp=1, world_size=3, sequence_parallel=False)
        wrong = found._replace(candidate=replace(found.candidate, layout=layout))
        return [wrong, found] if legal_too else [wrong]

    monkeypatch.setattr(plans, "search", illegal)
    legal_too = True
    found = nxd.plan(config, **JOB, constraints={"tp": 2, "pp": 2})
    assert len(found) == 1 and found[0].layout.tp == 2 and "tp 3" in next(iter(found.refused))
    assert "\nnot shown, as the type checker refuses it: tp 3" in str(found)
    assert len(nxd.plan(config, **JOB, constraints={"tp": 2, "pp": 2}, check=False)) == 2
    legal_too = False
    with pytest.raises(PlanError, match=r"refuses all plans; check=False \(--no-check\) shows them\n  - tp 3"):
        len(nxd.plan(config, **JOB, constraints={"tp": 2, "pp": 2}))


@pytest.mark.slow
def test_a_kind_that_has_passed_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that does not divide the sequences is found; what has passed is not played again by another process."""
    workload = workload_of("llama-1b")
    candidate = Candidate(Layout(2, cp=2, global_batch=8, seq_len=16, dtype="bfloat16"))
    with monkeypatch.context() as broken:
        broken.setattr(plan_check, "get_batch_on_this_context_parallel_rank", lambda batch, **options: batch)
        assert problem_of(candidate, workload)
    plan_check._known.clear()
    assert problem_of(candidate, workload) == ""
    plan_check._known.clear()
    monkeypatch.setattr(plan_check, "_checked", lambda *args: ("played again", ""))
    assert problem_of(candidate, workload) == ""
    assert problem_of(replace(candidate, recompute="full"), workload) == "played again"


@pytest.mark.slow
def test_an_optimizer_that_does_not_sum_its_norm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's step is a phase of the check by itself, which forward and backward pass."""

    def of_this_rank(params: Any, grads: Any, norm_type: float, groups: Any, **options: Any) -> Any:
        return norm_of(params, grads, norm_type, [], **options)

    monkeypatch.setattr("neuronx_dist.optimizer.zero1.norm_of", of_this_rank)
    candidate, workload = Candidate(Layout(4, tp=2, zero1=True, global_batch=8, seq_len=16)), workload_of("llama-1b")
    problem = plan_check._problem(candidate, plan_check.small_config(workload, candidate), "G")
    assert (
        problem.startswith("SGD.step: the gradient of a parameter") and "in the optimizer's step of rank 0" in problem
    )


@pytest.mark.slow
def test_a_plan_with_overlap_is_checked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 sends more than the others where gradients are reduced in backward."""
    candidate = Candidate(Layout(4, tp=2, zero1=True, global_batch=8, seq_len=16), overlap=True)
    workload, finish = workload_of("llama-1b"), BackwardReduction.finish
    config = plan_check.small_config(workload, candidate)
    assert plan_check._problem(candidate, config, "G") == ""

    def finish_and_send(self: BackwardReduction) -> None:
        finish(self)
        if comm.rank("world") == 0:
            comm.all_reduce(torch.zeros(1), "dp")

    monkeypatch.setattr(BackwardReduction, "finish", finish_and_send)
    assert plan_check._problem(small_candidate(candidate, workload), config, "G")


def test_plans_of_an_architecture_without_types_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The problem without tp, pp, cp and ep, and that of the plan, if it is another one."""
    here = "no rule\nfor x"
    monkeypatch.setattr(
        plan_check,
        "_problem",
        lambda small, config, level: (here if small.layout.tp > 1 else "no rule\nfor x") if level else "",
    )
    found = nxd.plan("llama-1b", **JOB, constraints={"tp": 2, "pp": 2})
    said = "\n\ntypes are not checked: the checker refuses this model on two data ranks alone: no rule"
    assert str(found).endswith(said) and not found.refused
    here = "not equal\non rank 1"
    plan_check._known.clear()
    assert str(nxd.plan("llama-1b", **JOB, constraints={"tp": 2, "pp": 2})).endswith(
        f"{said}; in the plan's layout: not equal"
    )
    assert not plan_check._passed_file().exists()  # the next process says so too


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", pytest.param("deepseek-v3", marks=pytest.mark.full)])
def test_architectures_by_name(model: str) -> None:
    """The config that stands for a name has the parameters of its workload."""
    workload = workload_of(model)
    config = plan_check._config_of(workload)
    assert workload_of(config).num_parameters == workload.num_parameters
    ep = 2 if workload.experts else 1
    layout = Layout(4, tp=2, ep=ep, global_batch=8, seq_len=16, dtype="bfloat16", zero1=True)
    assert problem_of(Candidate(layout, fused_loss=workload.fuses_loss), workload) == ""


def tiny_mixtral() -> Any:
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    return transformers.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, num_local_experts=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "degrees",
    [
        dict(world_size=2, cp=2, ep=2),
        dict(world_size=4, cp=2, ep=4, global_batch=2),  # one row on each data rank
        dict(world_size=4, cp=2, global_batch=2),
        dict(world_size=4, tp=2, ep=2, sequence_parallel=True, zero1=True),
    ],
    ids=str,
)
def test_experts_beside_other_axes_pass(degrees: dict[str, Any]) -> None:
    layout = Layout(**{"global_batch": 4, **degrees}, seq_len=16)
    assert plan_check._problem(Candidate(layout), tiny_mixtral(), "G") == ""


@pytest.mark.slow
def test_rows_that_experts_return_in_another_order_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(world_size=2, cp=2, ep=2, global_batch=4, seq_len=16)
    monkeypatch.setattr(dispatch, "stamp_rows", lambda *args: None)  # the rows of dim 0, in order
    assert "does not align" in plan_check._problem(Candidate(layout), tiny_mixtral(), "G")

"""The policies by name, plans as policies, and what a policy is refused for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist.parallelize.choose.stages import schedule_of
from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.policy.plans import plan_of
from neuronx_dist.parallelize.policy.policies import POLICIES, divide, divide_like
from neuronx_dist.pipeline.schedule import format_schedule, prove
from neuronx_dist.planning.costs import H100
from neuronx_dist.planning.plan import Plan, PlanError
from neuronx_dist.program.program import operands_of
from neuronx_dist.spmd.types import I, R, S, Shard
from tests.parallelize.support.lines import Lines, llama, mlp


def config(plan, **pas_config):
    return ComputeConfig(plan, plan, use_end2end=True, pas_config=pas_config)


def test_dp_cuts_nothing_and_needs_units_of_one_rank():
    division = divide(mlp(), "dp", config(1))
    assert division.size == 1
    for call in division.program.calls:
        strategy = division.strategies[call]
        assert not any(isinstance(t, Shard) for t in (*strategy.operands, *strategy.results))
        for value, want in zip(operands_of(call), strategy.operands):
            assert division.type_of(value) == want  # no conversion stands anywhere
    with pytest.raises(PlanError, match="'dp' needs plan_ngpus=1, got 2.*'data'"):
        divide(mlp(), "dp", config(2))


@pytest.mark.parametrize("size", [2, 4])
def test_tp_stores_every_weight_in_shards(size):
    division = divide(mlp(4, 16), "tp", config(size))
    assert all(isinstance(division.types[value], S) for value in division.program.parameters)


def test_tp_leaves_what_cannot_be_cut():
    division = divide(mlp(2, 15, batch=8), "tp", config(2))
    assert all(division.types[value] == I for value in division.program.parameters)


def with_targets():
    lines = Lines(torch.float64)
    x, target = lines.input("x", 8, 6), lines.input("target", 8, 6)
    y = lines(F.linear, x, lines.parameter("weight", 6, 6))
    return lines.program(lines(torch.sum, lines(torch.mul, y, target)))


@pytest.mark.parametrize("program", [lambda: mlp(3, 16), with_targets], ids=["mlp", "targets"])
def test_data_cuts_the_batch_and_keeps_weights_whole(program):
    division = divide(program(), "data", config(2))
    assert all(division.types[value] == I for value in division.program.parameters)
    for call in division.program.calls:
        if call.name == "linear":
            assert division.strategies[call].operands == (S(0), R)
            assert division.strategies[call].results == (S(0),)


def test_data_needs_a_batch_that_divides():
    with pytest.raises(PlanError, match=r"'data' cannot cut the batch: dim 0 of x \[7, 16\] over 2 ranks"):
        divide(mlp(2, 16, batch=7), "data", config(2))


def test_data_needs_an_input():
    program = replace(mlp(2, 16), inputs=[])
    with pytest.raises(PlanError, match="'data' cuts the batch, but forward has no tensor argument"):
        divide(program, "data", config(2))


def test_pp_has_a_stage_a_rank_of_equal_time():
    division = divide(mlp(8, 16), "pp", config(4, pipeline_nmicros=8, costs=replace(H100, link_latency=0.0)))
    assert (division.size, division.pipeline_ranks, division.microbatches, division.schedule) == (1, 4, 8, "1f1b")
    assert division.stages[0] == 0 and len(division.stages) == 4
    bounds = [*division.stages, len(division.program.calls)]
    products = [sum(c.name == "linear" for c in division.program.calls[a:b]) for a, b in zip(bounds, bounds[1:])]
    assert products == [2, 2, 2, 2]


def test_hybrid_cuts_weights_inside_stages():
    division = divide(mlp(4, 16), "hybrid", config(4, pipeline_nmicros=2, pipeline_nstages=2))
    assert (division.size, division.pipeline_ranks, len(division.stages)) == (2, 2, 2)
    assert all(isinstance(division.types[value], S) for value in division.program.parameters)
    chunks = divide(mlp(8, 16), "hybrid", config(4, pipeline_nmicros=4, pp_size=2, pipeline_nstages=4,
                                                 pipeline_scheduler="1f1b_interleaved"))  # fmt: skip
    assert (chunks.size, chunks.pipeline_ranks, len(chunks.stages), chunks.schedule) == (2, 2, 4, "interleaved")


def test_autodist_takes_the_fastest():
    """On a fast device with slow links it cuts nothing; at Llama's size it finds Megatron's layout."""
    small = divide(mlp(2, 16), "autodist", config(2))
    assert all(small.types[value] == I for value in small.program.parameters)
    large = divide(llama(1), "autodist", config(8))
    assert {str(large.types[value]) for value in large.program.parameters if "proj" in value.path} == {"S(0)", "S(1)"}


def test_autodist_tries_pipelines_and_fits_memory():
    program = mlp(8, 64, batch=4096)
    free = divide(program, "autodist", config(4, pipeline_nmicros=8))
    assert free.pipeline_ranks * free.size == 4
    with pytest.raises(
        PlanError, match="autodist found no plan:\n  - 1 stages: every division over 2 ranks needs at least"
    ):
        divide(mlp(2, 64, batch=64), "autodist", config(2, mem_constraint=1e-6))
    recomputed = divide(mlp(2, 16), "autodist", config(2, recompute_modules="layers.1"))
    assert recomputed.recompute == [(2, 4)]
    with pytest.raises(PlanError, match="recompute_modules: module 'layer.9' has no operation; nearest: layers"):
        divide(mlp(2, 16), "autodist", config(2, recompute_modules="layer.9"))


def test_stages_begin_at_pivots():
    """The stages have unequal numbers of layers; without a number of microbatches, `update_freq` is it."""
    options = {"pipeline_pivots": "layers.1,layers.6", "update_freq": (8, 1), "pipeline_nstages": 2, "task_name": "run"}
    division = divide(mlp(8, 16), "autodist", config(2, _mine=1, **options))
    assert (division.stages, division.microbatches, division.pipeline_ranks) == ([0, 12], 8, 2)
    del options["task_name"]
    assert [divide(mlp(8, 16), policy, config(2, **options)).stages for policy in ("pp", "hybrid")] == [[0, 12]] * 2
    with pytest.raises(PlanError, match="4 stages need 3 calls at which one may begin, not 2"):
        divide(mlp(8, 16), "autodist", config(4, **options | {"pipeline_nstages": 4}))
    with pytest.raises(PlanError, match="pipeline_pivots: module 'layer' has no operation"):
        divide(mlp(8, 16), "autodist", config(2, **options | {"pipeline_pivots": "layer"}))
    for degree, stages in ((1, 4), (2, 2)):
        options = {"pipeline_nmicros": 4, "max_partition_degree": degree, "costs": replace(H100, link_latency=1.0)}
        assert divide(mlp(8, 16), "autodist", config(4, **options)).pipeline_ranks >= stages


def test_chimera_has_four_stages_and_pairs_of_microbatches():
    orders = [format_schedule(schedule_of(4, 4, 4, "chimera_direct").computations(stage)) for stage in range(4)]
    assert orders == [
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 F1 B0 B1 F2 F3 B2 B3",
        "F0 F1 B0 B1 F2 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    prove(schedule_of(4, 4, 8, "chimera_direct"))
    for ranks, microbatches in ((2, 4), (4, 3)):
        with pytest.raises(ValueError, match="'chimera_direct' has 4 stages on 4 groups of ranks and an even number"):
            schedule_of(ranks, 4, microbatches, "chimera_direct")


def test_policies_that_need_more_say_so():
    with pytest.raises(PlanError, match=r"pas_config\['pipeline_nmicros'\]"):
        divide(mlp(), "pp", config(2))
    with pytest.raises(ValueError, match="use_end2end=True"):
        divide(mlp(), "pp", ComputeConfig(2, 2, pas_config={"pipeline_nmicros": 2}))
    with pytest.raises(PlanError, match="pp_size=3 does not divide plan_ngpus=4"):
        divide(mlp(8), "hybrid", config(4, pipeline_nmicros=2, pp_size=3))
    with pytest.raises(PlanError, match="pipeline_nstages=3 is not a multiple of pp_size=2"):
        divide(mlp(8), "hybrid", config(4, pipeline_nmicros=2, pp_size=2, pipeline_nstages=3))
    with pytest.raises(PlanError, match="2 calls cannot be cut into 4 stages"):
        divide(mlp(1, 16, loss=False), "pp", config(4, pipeline_nmicros=2))


def test_unknown_policies_and_options_are_refused_with_the_nearest():
    with pytest.raises(PlanError, match="unknown policy 'autodits', and no file has this name; nearest: autodist"):
        divide(mlp(), "autodits", config(2))
    with pytest.raises(PlanError, match=r"pas_config\['pipeline_nmicro'\] is no option of the policy 'pp'; nearest: "
                                        "pipeline_nmicros"):  # fmt: skip
        divide(mlp(), "pp", config(2, pipeline_nmicro=2))
    with pytest.raises(PlanError, match=r"pas_config\['costs'\]='tpu' is unknown; there are h100, cpu"):
        divide(mlp(), "tp", config(2, costs="tpu"))
    with pytest.raises(PlanError, match="must return the graph, got None"):
        divide(mlp(), lambda graph, config: None, config(2))


def test_options_of_nnscaler_that_a_policy_does_not_read_are_warned_of():
    options = {"update_freq": 2, "task_name": "run", "pipeline_nmicros": 4, "seed": 1}
    with pytest.warns(
        UserWarning, match="'tp' does not read pipeline_nmicros, task_name, update_freq; it reads costs,"
    ):
        division = divide(mlp(2, 16), "tp", config(2, **options))
    assert division.size == 2
    with pytest.raises(PlanError, match=r"pas_config\['task_nam'\] is no option of the policy 'tp'"):
        divide(mlp(2, 16), "tp", config(2, task_nam="run"))


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "dp"])
def test_every_policy_divides_llama(policy):
    options = {"pipeline_nmicros": 4} if policy in ("pp", "hybrid", "autodist") else {}
    options |= {"pipeline_nstages": 2} if policy == "hybrid" else {}
    division = divide(llama(2, hidden=64, ffn=128, heads=4, kv_heads=2, seq=16, batch=4), policy, config(4, **options))
    assert division.size * division.pipeline_ranks == 4
    assert set(division.strategies) == set(division.program.calls)


def test_evaluation_stores_parameters_as_training_does():
    training = divide(mlp(2, 16), "tp", config(2))
    evaluation = divide_like(training, mlp(2, 16), config(2))
    assert [training.types[v] for v in training.program.parameters] == [
        evaluation.types[v] for v in evaluation.program.parameters
    ]


# Plans.


@pytest.mark.parametrize(
    "policy, options",
    [
        ("tp", {}),
        ("hybrid", {"pipeline_nmicros": 4, "pipeline_nstages": 2}),
        (
            "hybrid",
            {"pipeline_nmicros": 4, "pipeline_nstages": 4, "pp_size": 2, "pipeline_scheduler": "1f1b_interleaved"},
        ),
    ],
)
def test_a_saved_plan_divides_the_same_program_alike(tmp_path, policy, options):
    division = divide(mlp(4, 16), policy, config(4, **options))
    path = tmp_path / "mlp.plan.json"
    plan_of(division).save(path)
    for given in (path, str(path), Plan.load(path)):
        again = divide(mlp(4, 16), given, config(4))
        assert [again.strategies[call].name for call in again.program.calls] == [
            division.strategies[call].name for call in division.program.calls
        ]
        assert [again.types[v] for v in again.program.parameters] == [
            division.types[v] for v in division.program.parameters
        ]
        for field in ("stages", "schedule", "microbatches", "pipeline_ranks", "size", "recompute"):
            assert getattr(again, field) == getattr(division, field), field


def test_a_plan_is_kept_to_where_something_else_is_faster():
    plan = plan_of(divide(mlp(2, 16), "autodist", config(2)))
    cut = [call._replace(strategy="S(0) of operand 0") if call.function == "relu" else call for call in plan.calls]
    division = divide(mlp(2, 16), replace(plan, calls=tuple(cut)), config(2))
    assert {division.strategies[c].results for c in division.program.calls if c.name == "relu"} == {(S(0),)}


def test_autodist_loads_plans(tmp_path):
    path = str(tmp_path / "plan.json")
    division = divide(mlp(2, 16), "autodist", config(2))
    plan_of(division).save(path)
    again = divide(mlp(2, 16), "autodist", config(2, load_plan_path=path))
    assert [again.types[v] for v in again.program.parameters] == [
        division.types[v] for v in division.program.parameters
    ]


def test_a_plan_of_something_else_is_refused_with_what_differs():
    plan = plan_of(divide(mlp(2, 16), "tp", config(2)))
    with pytest.raises(PlanError, match=r"ranks of a unit: tp=2 x pp=1 in the plan, 4 here"):
        divide(mlp(2, 16), plan, config(4))
    with pytest.raises(PlanError, match=r"parameter layers.0.weight: float64\[16, 16\] in the plan, float64\[32, 32\]"):
        divide(mlp(2, 32), plan, config(2))
    with pytest.raises(PlanError, match=r"input x: float64\[8, 16\] in the plan, float64\[4, 16\] here"):
        divide(mlp(2, 16, batch=4), plan, config(2))
    with pytest.raises(PlanError, match=r"parameter layers.2.weight \[16, 16\] is here and not in the plan"):
        divide(mlp(3, 16), plan, config(2))
    with pytest.raises(PlanError, match="units: dp=1 in the plan, 2 here"):
        divide(mlp(2, 16), plan, ComputeConfig(2, 4))
    with pytest.raises(PlanError, match="call 4: sum in the plan, nothing here|5 calls in the plan, 4 here"):
        divide(mlp(2, 16, loss=False), plan, config(2))

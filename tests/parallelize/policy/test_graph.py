"""The verbs of `IRGraph`: what they decide holds, the rest is chosen, and what cannot be is refused by name."""

from __future__ import annotations

import pytest

from neuronx_dist.parallelize.config import ComputeConfig
from neuronx_dist.parallelize.policy.graph import IRDataOperation, IRFwOperation, IRGraph, IRSegment
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.planning.plan import PlanError
from neuronx_dist.spmd.types import I, P, S, Shard
from tests.parallelize.support.lines import llama, mlp


def config(plan, **pas_config):
    return ComputeConfig(plan, plan, use_end2end=True, pas_config=pas_config)


def graph_of(program, plan):
    return IRGraph(program, config(plan))


def placed(graph, parts, first=0):
    for index, part in enumerate(parts):
        graph.assign(part, first + index)


def columns(graph, config):
    """A policy as for nnScaler: linear layers by columns, all else replicated."""
    size = config.plan_ngpus
    for node in graph.select(ntype=(IRFwOperation, IRDataOperation)):
        if node.name == "linear" and node.algorithm("dim").satisfy(idx=1, dim=0, num=size):
            parts = graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=size)
        else:
            parts = graph.replicate(node, times=size)
        placed(graph, parts)
    return graph


def test_a_policy_for_nnscaler_is_carried_out():
    division = divide(mlp(2, 16), columns, config(4))
    for call in division.program.calls:
        strategy = division.strategies[call]
        if call.name == "linear":
            assert strategy.operands[1] == S(0) and strategy.results == (S(1),)
        else:
            assert not any(isinstance(t, Shard) or t is P for t in (*strategy.operands, *strategy.results))
    assert [division.types[value] for value in division.program.parameters] == [S(0), S(0)]


def test_what_is_left_open_is_chosen():
    def first_by_rows(graph, config):
        node = graph.select(name="linear")[0]
        placed(graph, graph.partition(node, node.algorithm("dim"), idx=1, dim=1, num=2))
        return graph

    division = divide(mlp(2, 16), first_by_rows, config(2))
    first = division.program.calls[0]
    assert division.strategies[first].operands == (S(1), S(1))
    assert set(division.strategies) == set(division.program.calls)


def test_select_by_name_type_and_module():
    graph = graph_of(llama(2), 4)
    assert [node.name for node in graph.select(name="linear", module="layers.0.mlp")] == ["linear"] * 3
    assert len(graph.select(module="layers.*.self_attn.q_proj")) == 2
    assert [type(node) for node in graph.select(ntype=IRDataOperation)] == [IRDataOperation]
    assert len(graph.nodes()) == len(graph.program.calls) + 1
    assert graph.select(name="linear")[0].input(1).path == "layers.0.self_attn.q_proj.weight"
    assert graph.select(name="layer") == []


def test_transform_space_and_satisfy_are_what_the_rules_allow():
    graph = graph_of(mlp(1, 16, batch=8), 4)
    linear, relu, total = graph.select(ntype=IRFwOperation)
    assert linear.transform_space() == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert relu.transform_space() == total.transform_space() == [(0, 0), (0, 1)]
    dim = linear.algorithm("dim")
    assert dim.satisfy(idx=0, dim=0, num=8) and not dim.satisfy(idx=0, dim=0, num=16)  # a batch of 8
    assert not dim.satisfy(idx=2, dim=0, num=4) and not dim.satisfy(idx=0, dim=2, num=4)
    with pytest.raises(PlanError, match="has no algorithm 'halo'"):
        linear.algorithm("halo")


def test_shard_decides_how_weights_are_stored():
    def policy(graph, config):
        graph.shard("layers.*.mlp.up_proj", weight=0)
        graph.shard("layers.0.mlp.down_proj", weight=-2)
        graph.shard("layers.1.mlp.gate_proj", weight=None)
        return graph

    division = divide(llama(2, hidden=64, ffn=128, heads=4, kv_heads=2, seq=16), policy, config(2))
    types = {value.path: division.types[value] for value in division.program.parameters}
    assert types["layers.0.mlp.up_proj.weight"] == types["layers.1.mlp.up_proj.weight"] == S(0)
    assert types["layers.0.mlp.down_proj.weight"] == S(0)
    assert types["layers.1.mlp.gate_proj.weight"] == I
    graph = graph_of(mlp(), 2)
    with pytest.raises(PlanError, match="no parameter is called layer.0.weight; nearest: layers.0.weight"):
        graph.shard("layer.0", weight=0)
    with pytest.raises(PlanError, match=r"layers.0.weight \[16, 16\] has no dim 2"):
        graph.shard("layers.0", weight=2)


def test_stages_recompute_and_schedule():
    def policy(graph, config):
        linear = graph.select(name="linear")
        graph.multiref(graph.program.inputs[0])
        graph.recompute([*graph.select(module="layers.1"), *graph.select(module="layers.2")])
        graph.staging([linear[0], linear[2]])
        for number, stage in enumerate(graph.select(ntype=IRSegment, flatten=False)):
            for node in stage.nodes():
                if node.name == "linear":
                    parts = graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=2)
                    placed(graph, parts, 2 * number)
        config.apply_pipeline_scheduler(graph, 2, 4, "gpipe")
        return graph

    division = divide(mlp(4, 16), policy, config(4))
    assert (division.stages, division.recompute) == ([0, 4], [(2, 6)])
    assert (division.schedule, division.microbatches, division.size, division.pipeline_ranks) == ("gpipe", 4, 2, 2)


def test_stages_of_one_rank_are_assigned_whole():
    def policy(graph, config):
        linear = graph.select(name="linear")
        graph.staging([linear[0], linear[1]])
        for number, stage in enumerate(graph.select(ntype=IRSegment)):
            graph.assign(stage, number)
        return config.apply_pipeline_scheduler(graph, 2, 4, "1f1b")

    division = divide(mlp(2, 16), policy, config(2))
    assert (division.size, division.stages) == (1, [0, 2])
    assert [node.device for node in graph_of(mlp(), 1).nodes()] == [[]] * 6


def test_explain_names_every_strategy_and_what_it_would_cost():
    graph = graph_of(llama(1), 8)
    node = graph.select(name="linear", module="layers.0.mlp.up_proj")[0]
    text = graph.explain(node)
    lines = text.splitlines()
    assert sum(line.startswith("->") for line in lines) == 1
    chosen = next(line for line in lines if line.startswith("->"))
    assert "S(0) of operand 1: R, S(0) -> S(2)" in chosen and "+0.000" in chosen
    others = [line for line in lines[1:] if " ms, +" in line and line is not chosen]
    assert others and not any("+0.000" in line for line in others)
    assert {strategy.name for strategy in graph.strategies(node)} >= {"R", "I", "S(0) of operand 1"}


# What cannot be.


def refused(program, policy, plan=2):
    with pytest.raises(PlanError) as caught:
        divide(program, policy, config(plan))
    return str(caught.value)


def test_a_forgotten_device():
    def policy(graph, config):
        node = graph.select(name="linear")[0]
        parts = graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=2)
        graph.assign(parts[0], 0)
        return graph

    text = refused(mlp(), policy)
    assert text.startswith("linear(x, layers_0_weight)") and "parts [1] of 2 have no device" in text


def test_assigned_twice():
    def policy(graph, config):
        node = graph.select(name="linear")[0]
        parts = graph.replicate(node, times=2)
        graph.assign(parts[0], 0)
        graph.assign(parts[0], 1)
        return graph

    assert "is assigned twice: to device 0, and to 1" in refused(mlp(), policy)


def test_divided_twice():
    def policy(graph, config):
        node = graph.select(name="linear")[0]
        graph.replicate(node, times=2)
        graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=2)
        return graph

    assert "was divided already, into 2 parts" in refused(mlp(), policy)


def test_parts_on_other_ranks_than_one_program_serves():
    def swapped(graph, config):
        node = graph.select(name="linear")[0]
        parts = graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=2)
        placed(graph, reversed(parts))
        return graph

    def few(graph, config):
        node = graph.select(name="linear")[0]
        placed(graph, graph.partition(node, node.algorithm("dim"), idx=1, dim=0, num=2))
        return graph

    def alone(graph, config):
        graph.assign(graph.select(name="relu")[0], 1)
        return graph

    assert "is on devices [1, 0], but its stage has devices [0, 1]" in refused(mlp(), swapped)
    text = refused(mlp(), few, 4)
    assert "is on devices [0, 1], but its stage has devices [0, 1, 2, 3]" in text and "replicate(node, times=4)" in text
    assert "graph.staging makes pipeline stages" in refused(mlp(), alone)


def test_a_cut_that_no_rule_allows_names_those_that_are():
    def policy(graph, config):
        node = graph.select(name="sum")[0]
        graph.partition(node, node.algorithm("dim"), idx=0, dim=3, num=2)
        return graph

    text = refused(mlp(), policy)
    assert "cannot be cut along dim 3 of operand 0 over 2 ranks" in text and "(idx=0, dim=0), (idx=0, dim=1)" in text


def test_no_such_device_and_inputs_are_not_cut():
    graph = graph_of(mlp(), 2)
    data, node = graph.nodes()[:2]
    with pytest.raises(PlanError, match="cannot be on device 2: plan_ngpus=2, so there are 0 to 1"):
        graph.assign(node, 2)
    with pytest.raises(PlanError, match="inputs x cannot be partitioned"):
        graph.partition(data, node.algorithm("dim"), idx=0, dim=0, num=2)


def test_stages_that_do_not_fit():
    graph = graph_of(mlp(4), 4)
    linear = graph.select(name="linear")
    with pytest.raises(PlanError, match="3 stages do not divide plan_ngpus=4.*2 and 4 do"):
        graph.staging(linear[:3])
    with pytest.raises(PlanError, match="in their order"):
        graph.staging([linear[1], linear[0]])
    graph.staging([linear[0], linear[2]])
    with pytest.raises(PlanError, match="graph.staging made 2 stages, but they have no schedule"):
        graph.divide()
    graph.config.apply_pipeline_scheduler(graph, 4, 4, "1f1b")
    with pytest.raises(PlanError, match="made 2 stages, but apply_pipeline_scheduler got 4"):
        graph.divide()


def test_verbs_that_contradict_one_another():
    def policy(graph, config):
        first, second = graph.select(name="linear")
        placed(graph, graph.partition(first, first.algorithm("dim"), idx=1, dim=0, num=2))
        graph.constraints.strategies[second.call] = [lambda strategy: False]
        return graph

    assert "the plan allows none of its strategies over 2 ranks: R, I" in refused(mlp(), policy)

"""A unit over two axes and more: each divides what a rank of the axes before runs."""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, IRGraph, parallelize
from neuronx_dist.parallelize.choose.local_program import local_program
from neuronx_dist.parallelize.emit.emitted_class import emit
from neuronx_dist.parallelize.policy.operations import IRFwOperation
from neuronx_dist.parallelize.policy.plans import plan_of
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.parallelize.train.stored import constants_of, stored_of
from neuronx_dist.planning.plan import Plan, PlanError
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.program import Call, Division, Strategy
from neuronx_dist.program.record import record_program
from neuronx_dist.spmd import I, S
from neuronx_dist.spmd.random import streams
from tests.parallelize.support.hf_models import HF_MODELS, hf_model
from tests.parallelize.support.models import MODELS, model
from tests.parallelize.support.mutants import EAGER, Emitted, mutants, noticed
from tests.parallelize.support.parity import assert_equal, own_statistics, trained, trained_parallel
from tests.support.pool import processes

pytestmark = pytest.mark.slow

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
Policy = Callable[[IRGraph, ComputeConfig], IRGraph]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(torch.relu(self.up(x)))).square().mean()


def mlp() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Mlp().double(), {"x": torch.randn(8, 8).double()}


def config(plan: int = 4, **options: Any) -> ComputeConfig:
    return ComputeConfig(plan, plan, pas_config=options)


def divided(module: nn.Module, arguments: dict[str, Any], policy: Any, given: ComputeConfig) -> Division:
    return divide(decomposed(record_program(module, arguments, training=True)), policy, given)


def types_of(division: Division) -> dict[str, str]:
    return {
        value.path: " ".join(map(str, (*value.outer, division.types[value]))) for value in division.program.parameters
    }


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name, units",
    [
        pytest.param(name, units, marks=[] if (name in ("mlp", "conv", "gpt")) == (units == 2) else pytest.mark.full)
        for name in MODELS
        for units in (1, 2)
    ],
)
def test_parity(name: str, units: int, tmp_path: Path) -> None:
    """The batch over the first axis, the weights over the second."""
    module, arguments = model(name)
    given = ComputeConfig(4, 4 * units, use_end2end=name == "mlp", pas_config={"tp_size": 2})
    wanted = trained(module, arguments, SGD, 3, units)
    has = trained_parallel(module, arguments, SGD, 3, given, "tp", tmp_path)
    assert_equal(has, own_statistics(wanted, has, units), 1e-10)


@pytest.mark.parametrize(
    "name", [name if name in ("gpt", "rotary") else pytest.param(name, marks=pytest.mark.full) for name in MODELS]
)
def test_parity_over_three_axes(name: str, tmp_path: Path) -> None:
    """The batch over the first axis, the weights over the other two."""
    module, arguments = model(name)
    given = ComputeConfig(8, 8, use_end2end=name == "mlp", pas_config={"tp_size": [2, 2]})
    wanted = trained(module, arguments, SGD, 3, 1)
    has = trained_parallel(module, arguments, SGD, 3, given, "tp", tmp_path)
    assert_equal(has, own_statistics(wanted, has, 1), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.full) for name in HF_MODELS]
)
def test_hugging_face(name: str, tmp_path: Path) -> None:
    module, arguments = hf_model(name)
    wanted = trained(module, arguments, SGD, 3, 1)
    has = trained_parallel(module, arguments, SGD, 3, config(tp_size=2), "data", tmp_path)
    assert_equal(has, own_statistics(wanted, has, 1), 1e-5)


def test_evaluation_over_two_axes(tmp_path: Path) -> None:
    """Evaluation alone would divide the first axis in another way than training, as calls cost little here."""
    module, arguments = model("conv")
    given = config(tp_size=2, costs=EAGER)

    def rank() -> Any:
        parallel: Any = parallelize(module, dict(arguments), "tp", given, gen_savedir=tmp_path)
        with torch.no_grad():
            return parallel.train()(**arguments), parallel.eval()(**arguments)

    original = copy.deepcopy(module)
    with torch.no_grad():
        wanted = original.train()(**arguments), original.eval()(**arguments)
    for has in threads.run(Mesh(4, tp=4), rank):
        torch.testing.assert_close(has, wanted, rtol=1e-10, atol=1e-10)


# --- what a policy says -----------------------------------------------------------------------------------------------


def by_batch_and_features(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """nnScaler's verbs: a part of an operation is partitioned again."""
    for node in graph.select(name="linear"):
        dim = 0 if node.module == "up" else 1
        for i, half in enumerate(graph.partition(node, node.algorithm("dim"), idx=0, dim=0, num=2)):
            for j, part in enumerate(graph.partition(half, half.algorithm("dim"), idx=1, dim=dim, num=2)):
                graph.assign(part, 2 * i + j)
    return graph


def weights_first(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """Weights over the first axis, by composites where there are some; the batch over the second."""
    graph.later.sizes = (2,)
    for node in graph.select(ntype=IRFwOperation):
        if node.name in ("embedding", "layer_norm", "cross_entropy"):
            composites = [s for s in graph.strategies(node) if s.name.startswith(node.name)]
            if composites and node.module in ("wte", "blocks.0.norm_1", "blocks.1.norm_2", ""):
                graph.constraints.strategies[node.call] = [composites[0].__eq__]

    def batch(inner: IRGraph, local: Any) -> None:
        for node in inner.operations:
            cut = [s for s in inner.strategies(node) if s.operands and s.operands[0] == S(0)]
            if node.name in ("embedding", "layer_norm", "cross_entropy", "scaled_dot_product_attention") and cut:
                inner.constraints.strategies[node.call] = [lambda s: bool(s.operands) and s.operands[0] == S(0)]

    graph.later.decide.append(batch)
    return graph


def test_a_part_is_partitioned_again(tmp_path: Path) -> None:
    module, arguments = mlp()
    division = divided(module, arguments, by_batch_and_features, config())
    assert division.axes == {"tp/2": 2, "tp%2": 2}
    types = types_of(division)
    assert types == {"up.weight": "I S(0)", "up.bias": "I S(0)", "down.weight": "I S(1)", "down.bias": "I I"}
    wanted = trained(module, arguments, SGD, 3, 1)
    assert_equal(trained_parallel(module, arguments, SGD, 3, config(), by_batch_and_features, tmp_path), wanted, 1e-10)


def test_composites_of_the_first_axis_are_cut_over_the_second(tmp_path: Path) -> None:
    module, arguments = model("gpt")
    source = emit(divided(module, arguments, weights_first, config()))
    for text in ("composites.embedding(tokens_S0", "composites.layer_norm(", "composites.cross_entropy("):
        assert text in source, source
    assert "[2 of 4, 8, 16] P, S(0)" in source and "[2 of 4, 8, 8 of 16] S(2), S(0)" in source and "[] I, P" in source
    wanted = trained(module, arguments, SGD, 3, 1)
    assert_equal(trained_parallel(module, arguments, SGD, 3, config(), weights_first, tmp_path), wanted, 1e-10)


def test_one_dim_is_cut_over_both_axes(tmp_path: Path) -> None:
    """In as many parts as there are ranks, beside operations in parts of parts; a weight is then in four shards."""

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        up, down = graph.select(name="linear")
        for device, part in enumerate(graph.partition(up, up.algorithm("dim"), idx=1, dim=0, num=4)):
            graph.assign(part, device)
        for i, half in enumerate(graph.replicate(down, 2)):
            for j, part in enumerate(graph.replicate(half, 2)):
                graph.assign(part, 2 * i + j)
        graph.constraints.types[graph.program.parameters[0]] = (S(0),)
        graph.shard("up", weight=0)
        return graph

    module, arguments = mlp()
    division = divided(module, arguments, policy, config())
    assert types_of(division)["up.weight"] == "S(0) S(0)"
    assert '"up.weight": Stored("parameter", (16, 8), torch.float64, S(0)),' in emit(division)
    wanted = trained(module, arguments, SGD, 3, 1)
    assert_equal(trained_parallel(module, arguments, SGD, 3, config(), policy, tmp_path), wanted, 1e-10)


AXES = ("tp/4", "tp/2%2", "tp%2")


def three_axes(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """The batch over the first axis, features over the second, the sum over features over the third."""
    for node in graph.select(name="linear"):
        cuts = [(0, 0), (1, 0), (0, 1)] if node.module == "up" else [(0, 0), (0, 1), (1, 0)]
        ends: list[Any] = [node]
        for idx, dim in cuts:
            ends = [
                part for end in ends for part in graph.partition(end, node.algorithm("dim"), idx=idx, dim=dim, num=2)
            ]
        for device, part in enumerate(ends):
            graph.assign(part, device)
    return graph


def test_parts_of_parts_are_partitioned_again(tmp_path: Path) -> None:
    module, arguments = mlp()
    division = divided(module, arguments, three_axes, config(8))
    assert division.axes == dict.fromkeys(AXES, 2)
    linears = [call for call in division.program.calls if call.name == "linear"]
    for linear, cuts in zip(linears, ["S(0) S(1) P", "S(0) P S(1)"], strict=True):
        results = [on.results[0] for on in linear.outer] + [division.strategies[linear].results[0]]
        assert " ".join(map(str, results)) == cuts
    wanted = trained(module, arguments, SGD, 3, 1)
    assert_equal(trained_parallel(module, arguments, SGD, 3, config(8), three_axes, tmp_path), wanted, 1e-10)


@pytest.mark.parametrize(
    "cut, axis",
    [("100", "tp/4"), ("010", "tp/2%2"), ("001", "tp%2"), ("110", "tp/2"), ("011", "tp%4"), ("111", ""), ("101", None)],
)
def test_a_weight_is_stored_in_shards_over_adjacent_axes(cut: str, axis: str | None, tmp_path: Path) -> None:
    """Merged states, too, are those of one process."""

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        def store(inner: IRGraph, is_cut: str) -> None:
            (weight,) = (value for value in inner.program.parameters if value.path == "up.weight")
            inner.constraints.types[weight] = (S(0) if is_cut == "1" else I,)
            (linear,) = (node for node in inner.select(name="linear") if node.module == "up")
            if is_cut == "1":
                inner.constraints.strategies[linear.call] = [lambda strategy: strategy.operands[1] == S(0)]

        store(graph, cut[0])
        graph.later.decide_each((2, 2), [partial(lambda x, inner, _: store(inner, x), x) for x in cut[1:]])
        return graph

    module, arguments = mlp()
    if axis is None:
        with pytest.raises(PlanError, match="up.weight"):
            divided(module, arguments, policy, config(8))
        return
    assert stored_of(module, divided(module, arguments, policy, config(8)))["up.weight"].axis == axis
    wanted = trained(module, arguments, SGD, 3, 1)
    assert_equal(trained_parallel(module, arguments, SGD, 3, config(8), policy, tmp_path), wanted, 1e-10)


def in_parts(graph: IRGraph, module: str, *sizes: int) -> None:
    """Replicates the linear of a module over so many ranks, then each part again."""
    (node,) = [node for node in graph.select(name="linear") if node.module == module]
    ends: list[Any] = [node]
    for size in sizes:
        ends = [part for end in ends for part in graph.replicate(end, size)]
    for device, end in enumerate(ends):
        graph.assign(end, device)


def other_axes(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    in_parts(graph, "up", 2, 4)
    in_parts(graph, "down", 4, 2)
    return graph


def three_axes_and_two(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    in_parts(graph, "up", 2, 2, 2)
    in_parts(graph, "down", 2, 4)
    return graph


def too_few(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    in_parts(graph, "up", 2, 2)
    return graph


def unlike(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    (up, _) = graph.select(name="linear")
    first, second = graph.replicate(up, 2)
    ends = [*graph.replicate(first, 2), *graph.partition(second, second.algorithm("dim"), idx=1, dim=0, num=2)]
    for device, part in enumerate(ends):
        graph.assign(part, device)
    return graph


def assigned_too_early(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    (up, _) = graph.select(name="linear")
    half = graph.replicate(up, 2)[0]
    graph.replicate(half, 2)
    graph.assign(half, 0)
    return graph


@pytest.mark.parametrize(
    "policy, plan, message",
    [
        (other_axes, 8, r"is divided into 2 \+ 2 \+ 2 \+ 2 parts, but a stage has 8 ranks, 2 x 4 on 2 axes"),
        (too_few, 8, r"is divided into 2 \+ 2 parts, but a stage has 8 ranks: all operations"),
        (three_axes_and_two, 8, r"is divided into 4 \+ 4 parts, but a stage has 8 ranks, 2 x 2 x 2 on 3 axes"),
        (unlike, 4, "the parts of linear.* are divided differently"),
        (assigned_too_early, 4, "is divided into 2 parts: assign the parts"),
    ],
)
def test_what_cannot_be(policy: Policy, plan: int, message: str) -> None:
    module, arguments = mlp()
    with pytest.raises(PlanError, match=message):
        divided(module, arguments, policy, config(plan))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tp_size": 3}, r"pas_config\['tp_size'\]=3 does not divide the 4 ranks of a stage; .* 2 and 4"),
        ({"tp_size": [2, 4]}, r"pas_config\['tp_size'\]=\[2, 4\] does not divide the 4 ranks of a stage"),
        ({"tp_sise": 2}, "nearest: .*tp_size"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    module, arguments = mlp()
    with pytest.raises(PlanError, match=message):
        divided(module, arguments, "tp", config(**options))


@pytest.mark.parametrize("given", [2, "2,2", {"a": 2}, [], ["2"], [True], [0]])
def test_bad_lists_of_axes(given: Any) -> None:
    with pytest.raises(TypeError, match=r"explore_axes'\] must be True or False, or a list of positive integers.*got "):
        config(explore_axes=given)


def test_a_chosen_job_refuses_axes_of_more_ranks() -> None:
    module, arguments = mlp()
    with pytest.raises(PlanError, match=r"no job of 4 ranks goes with explore_axes=\[2, 4\]"):
        divided(module, arguments, "autodist", ComputeConfig(None, 4, pas_config={"explore_axes": [2, 4]}))


@pytest.mark.parametrize("policy", ["tp", "data"])
@pytest.mark.parametrize("size, weight", [(1, "I"), ([1], "I"), (4, "S(0)"), ([4, 1], "S(0)")])
def test_weights_are_cut_over_tp_size_ranks(policy: str, size: Any, weight: str) -> None:
    """Over one rank, or over all of a stage, too."""
    division = divided(*mlp(), policy, config(tp_size=size))
    assert division.axes == {"tp": 4} and types_of(division)["up.weight"] == weight


@pytest.mark.parametrize("axes", [[4, 1], [1, 4]])
def test_axes_of_one_rank_are_left_out(axes: list[int]) -> None:
    assert divided(*mlp(), "autodist", config(explore_axes=axes)).axes == {"tp": 4}


def test_both_axes_are_explained() -> None:
    module, arguments = mlp()
    graph = IRGraph(decomposed(record_program(module, arguments, training=True)), config())
    graph.later.sizes = (2,)
    up, _ = graph.select(name="linear")
    first, second = graph.explain(up).split("linear(")[1:]
    assert "over 2 ranks of tp/2:" in first and "over 2 ranks of tp%2:" in second
    assert "S(0) of operand 0" in first and "S(0) of operand 0" in second
    graph = IRGraph(graph.program, config(8))
    graph.later.sizes = (2, 2)
    text = graph.explain(graph.select(name="linear")[0])
    assert [f"over 2 ranks of {axis}:" in text for axis in ("tp/4", "tp/2%2", "tp%2")] == [True] * 3


# --- choice and plans -------------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Two samples, six features: no dim is divided by four."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def of_version_1(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns a plan of two axes as its file was before there were more."""
    plan = json.loads(json.dumps(plan))
    (plan["second_calls"],), (_, plan["second"]) = plan.pop("later_calls"), plan.pop("axes")
    for tensor in (*plan["parameters"].values(), *plan["inputs"].values()):
        (tensor["second"],) = tensor.pop("later")
    return {**plan, "version": 1}


def test_autodist_finds_two_axes_and_a_plan_has_both(tmp_path: Path) -> None:
    module, arguments = Small().double(), {"x": torch.randn(2, 6).double()}
    file = tmp_path / "small.plan.json"
    division = divided(module, arguments, "autodist", config(explore_axes=True, costs=EAGER))
    plan_of(division).save(file)
    assert division.axes == {"tp/2": 2, "tp%2": 2}
    assert divided(module, arguments, "autodist", config(costs=EAGER)).axes == {"tp": 4}
    cut = [str(division.strategies[call].results) for call in division.program.calls if call.name == "linear"]
    assert any("S" in types for types in cut) and any(
        "S" in str(on.results) for call in division.program.calls if call.name == "linear" for on in call.outer
    )
    again = divided(module, arguments, file, config(costs=EAGER))  # by which collectives are joined
    assert emit(again) == emit(division)
    plan = json.loads(file.read_text())
    assert (plan["tp"], plan["axes"]) == (4, [2, 2])
    file.write_text(json.dumps(of_version_1(plan)))
    assert emit(divided(module, arguments, file, config(costs=EAGER))) == emit(division)
    file.write_text(json.dumps({**of_version_1(plan), "second": 3}))
    with pytest.raises(PlanError, match="second=3 must divide tp=4"):
        Plan.load(file)
    name, tensor = next(iter(plan["parameters"].items()))
    for later in ([], [*tensor["later"], "I"]):
        file.write_text(json.dumps({**plan, "parameters": {**plan["parameters"], name: {**tensor, "later": later}}}))
        with pytest.raises(PlanError, match=f"damaged plan: .*{name} has later=.*a type on each of 1 axes after"):
            Plan.load(file)
    plan["later_calls"][0].pop()
    file.write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=r"calls over axis 2, but dividing by the axis before"):
        divided(module, arguments, file, config())
    plan["axes"] = [2, 3]
    file.write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=r"axes=\(2, 3\) are 6 ranks, and not tp=4"):
        divided(module, arguments, file, config())


def test_a_limit_of_memory_holds_over_both_axes() -> None:
    """Weights, gradients and AdamW's state of one rank are a fourth of the whole only if both axes cut them."""
    module, arguments = mlp()
    whole = sum(p.numel() for p in module.parameters()) * (8 + 8 + 8)

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        graph.later.sizes, graph.memory = (2,), whole / 3 + 4 * 8 * 16 * 8
        return graph

    division = divided(module, arguments, policy, config())
    assert sum("S" in types for types in types_of(division).values()) >= 2

    def impossible(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        graph.later.sizes, graph.memory = (2,), whole / 50
        return graph

    with pytest.raises(PlanError, match="every division .* needs at least"):
        divided(module, arguments, impossible, config())


def test_a_ranks_program_computes_what_the_file_says() -> None:
    """Calls have local shapes; conversions of the first axis are calls, once for all who want one."""
    module, arguments = mlp()
    division = divided(module, arguments, "tp", config(tp_size=2))
    assert division.outer is not None
    local = local_program(division.outer)
    names = [call.name for call in local.program.calls]
    assert names.count("convert") == 5 and names.count("all_reduce") == 1  # x and 4 parameters; the loss
    assert [local.program.calls[start].name for start in local.starts[:2]] == ["convert", "relu"]
    for call, local_call in local.calls.items():
        types = division.outer.strategies[call].results
        for whole, value, spmd_type in zip(call.results, local_call.results, types, strict=True):
            assert value.outer == (spmd_type,)
            assert (value.shape == whole.shape) == (spmd_type.letter != "S")


def with_any(graph: IRGraph, random: Random) -> None:
    """Decides for strategies of some calls at random, as far as they go together."""
    problem = graph.problem()
    calls = [call for call in problem.program.calls if len(problem.options[call]) > 1]
    forced: dict[Call, Strategy] = {}
    for call in random.sample(calls, min(6, len(calls))):
        try:
            problem.solve(0.0, {**forced, call: (strategy := random.choice(problem.options[call]))})
        except PlanError:
            continue
        forced[call] = strategy
        graph.constraints.strategies.setdefault(call, []).append(strategy.__eq__)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2, 3))])
@pytest.mark.parametrize(
    "name, later",
    [
        pytest.param(name, later, marks=pytest.mark.full if later == (2, 2) and name not in ("gpt", "conv") else [])
        for name in MODELS
        for later in ((2,), (2, 2))
    ],
)
def test_any_division_is_right(name: str, later: tuple[int, ...], seed: int) -> None:
    """Whatever is chosen on all axes: types, results, gradients."""
    random = Random(seed)

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        graph.later.decide_each(later, [lambda inner, local: with_any(inner, random)] * len(later))
        with_any(graph, random)
        return graph

    program = emitted(name, policy, {"costs": "cpu"}, 2 * math.prod(later))
    assert noticed(program, program.source) == "", program.source


def test_three_axes_stand_in_a_plan(tmp_path: Path) -> None:
    module, arguments = mlp()
    given, file = config(8, explore_axes=[2, 2, 2], costs=EAGER), tmp_path / "mlp.plan.json"
    division = divided(module, arguments, "autodist", given)
    plan_of(division).save(file)
    assert division.axes == dict.fromkeys(AXES, 2) and Plan.load(file) == plan_of(division)
    assert emit(divided(module, arguments, file, config(8))) == emit(division)
    with pytest.raises(
        PlanError, match=r"explore_axes'\]=\[2, 3\] are 6 ranks, and no stage has so many: plan_ngpus=8"
    ):
        divided(module, arguments, "autodist", config(8, explore_axes=[2, 3]))


# --- random numbers ---------------------------------------------------------------------------------------------------


class Dropped(nn.Module):
    """Dropouts of one value, for each set of its dims."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [F.dropout(x * self.scale, training=True) for _ in range(2 ** x.dim())]


def cut_on_some(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """Dim n over axis n, if bit n of the dropout's number is set."""
    for number, node in enumerate(graph.select(name="dropout")):
        parts: list[Any] = [node]
        for dim in range(len(node.input(0).shape)):
            parts = [
                piece
                for part in parts
                for piece in (
                    graph.partition(part, part.algorithm("dim"), idx=0, dim=dim, num=2)
                    if number >> dim & 1
                    else graph.replicate(part, 2)
                )
            ]
        for device, part in enumerate(parts):
            graph.assign(part, device)
    return graph


def masks(folder: str, dims: int) -> list[torch.Tensor]:
    torch.manual_seed(5)
    streams().reset()
    x, given = torch.ones([16] * dims), config(2**dims)
    parallel: Any = parallelize(Dropped(), {"x": x}, cut_on_some, given, gen_savedir=folder)
    torch.manual_seed(5)
    return [x.detach() != 0 for x in parallel(x)]


@pytest.mark.parametrize("dims", [pytest.param(2, marks=pytest.mark.process), 3])
def test_masks_are_alike_where_values_are_whole(dims: int, tmp_path: Path) -> None:
    """There are as many different masks as there are shards."""
    if dims == 2:
        ranks = processes(4).run(masks, str(tmp_path), dims, mesh={"tp": 4})
    else:
        ranks = comm.threads.run(Mesh(8, tp=8), lambda: masks(str(tmp_path), dims))
    for numbers in zip(*ranks, strict=True):
        assert all(torch.equal(mask, numbers[0]) for mask in numbers)  # results are whole
    pieces = []
    for number, mask in enumerate(ranks[0]):
        inside = [mask]
        for dim in range(dims):
            inside = [x for piece in inside for x in piece.chunk(1 + (number >> dim & 1), dim)]
        pieces += inside
    assert len(pieces) == 3**dims
    for a, b in combinations(pieces, 2):
        common = tuple(slice(min(sizes)) for sizes in zip(a.shape, b.shape))
        assert abs((a[common] == b[common]).float().mean() - 0.5) < 0.25  # independent


# --- broken on purpose ------------------------------------------------------------------------------------------------


def emitted(name: str, policy: Any, options: dict[str, Any], ranks: int = 4) -> Emitted:
    module, arguments = mlp() if name == "mlp" else model(name)
    division = divided(module, arguments, policy, config(ranks, **options))
    stored = stored_of(module, division)
    source = emit(division, stored=stored, signature=inspect.signature(module.forward))
    constants = {key: value.constant for value, key in constants_of(division).items() if value.constant is not None}
    return Emitted(source, division, module, constants, arguments)


def over_another_axis(source: str, axes: Sequence[str]) -> list[str]:
    """The source with one conversion over another axis, for each."""
    lines = source.splitlines()
    found = []
    for number, line in enumerate(lines):
        for a, b in permutations([f'"{axis}"' for axis in axes], 2):
            if "= spmd." in line and a in line:
                found.append("\n".join([*lines[:number], line.replace(a, b), *lines[number + 1 :]]))
    return found


@pytest.mark.parametrize(
    "name, policy, options, ranks",
    [
        ("mlp", "tp", {"tp_size": 2}, 4),
        ("mlp", "tp", {"tp_size": [2, 2]}, 8),
        pytest.param("gpt", weights_first, {}, 4, marks=[pytest.mark.slow, pytest.mark.full]),
    ],
)
def test_every_mutant_is_refused(name: str, policy: Any, options: dict[str, Any], ranks: int) -> None:
    program = emitted(name, policy, options, ranks)
    assert noticed(program, program.source) == ""
    axes = [*program.division.axes]
    wrong = [mutant.edited for mutant in mutants(program.source)] + over_another_axis(program.source, axes)
    assert len(wrong) > 30
    missed = [source for source in wrong if not noticed(program, source)]
    changed = ["\n".join(set(source.splitlines()) - set(program.source.splitlines())) for source in missed]
    assert not missed, changed

"""Costs of plans: the figures add up, and are those of exact searches and of recorded collectives."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

from neuronx_dist import comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, ParallelModule, explain, parallelize
from neuronx_dist.parallelize.policy.graph import IRGraph
from neuronx_dist.planning.costs import H100
from neuronx_dist.planning.plan import Plan
from tests.parallelize.support.lines import mlp
from tests.parallelize.support.models import model
from tests.parallelize.support.mutants import EAGER
from tests.parallelize.support.parity import loss_of


@pytest.mark.slow
def test_an_alternative_costs_what_the_best_plan_with_it_costs() -> None:
    graph = IRGraph(mlp(), ComputeConfig(2, 2), costs=EAGER)
    problem = graph.problem()
    division, _, least = problem.solve(0.0)
    alternatives = problem.alternatives()
    count = 0
    for call, options in alternatives.items():
        for option, more in options:
            assert more == pytest.approx(problem.solve(0.0, {call: option}).cost - least, abs=1e-11)
            assert (more == 0.0) or option is not division.strategies[call]
            count += more > 0
    assert count > 8


def divided(
    folder: Path, name: str = "gpt", policy: Any = "tp", ranks: int = 2, frozen: Sequence[str] = (), **options: Any
) -> Any:
    """Returns the parallel class of a model of the table, with frozen submodules."""
    module, arguments = model(name)
    for path in frozen:
        module.get_submodule(path).requires_grad_(False)
    config = ComputeConfig(ranks, ranks, use_end2end="pipeline_nmicros" in options, pas_config=options)
    return parallelize(type(module), arguments, policy, config, gen_savedir=folder, module_fn=lambda: module)


def bytes_of(event: Any) -> int:
    """Bytes that a rank sends for a collective."""
    size = event.group_size
    sent = event.dtype.itemsize * prod(event.shape) * (size - 1)
    return sent if event.verb == "all_gather" else sent * (2 if event.verb == "all_reduce" else 1) // size


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, frozen, ranks, options",
    [
        ("gpt", [], 2, {}),
        ("gpt", ["wte", "wpe", "blocks.0"], 2, {}),
        ("gpt", [], 8, {"tp_size": [2, 2]}),
        ("mlp", [], 2, {}),
        ("rotary", [], 4, {}),
        ("conv", [], 4, {}),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_recorded_collectives(
    name: str, frozen: list[str], ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    """Layer norms of values without a gradient have no collective in backward. Inputs have a gradient."""
    parallel_class = divided(tmp_path, name, ranks=ranks, costs=EAGER, frozen=frozen, **options)
    costs, (_, arguments) = explain(parallel_class), model(name)
    arguments = pytree.tree_map_only(torch.Tensor, _with_gradient, arguments)

    def rank() -> list[Any]:
        parallel = parallel_class()
        with comm.record() as calls:
            loss_of(parallel(**arguments)).backward()
        return list(calls)

    events = threads.run(ComputeConfig(ranks, ranks).mesh(), rank)[0]
    predicted = sum(entry["forward_bytes"] + entry["backward_bytes"] for entry in costs["collectives"])
    assert predicted == sum(map(bytes_of, events)) > 0


def _with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.requires_grad_() if x.is_floating_point() else x


def test_figures_add_up_and_stand_in_the_plan(tmp_path: Path) -> None:
    costs = explain(divided(tmp_path, costs=EAGER))
    (file,) = tmp_path.rglob("plan.json")
    assert json.loads(file.read_text())["costs"].items() <= costs.items()
    assert Plan.load(file).costs is not None
    assert sum(row["times"] for row in costs["calls"]) == len(Plan.load(file).calls)
    rows = sum(row["seconds"] * row["times"] for row in costs["calls"])
    assert rows == pytest.approx(costs["seconds"], rel=0.01)
    assert 0 < costs["gap"] < 1e-3  # masks and positions are not divided
    assert costs["compute_seconds"] + costs["collective_seconds"] == pytest.approx(costs["seconds"])
    text = str(costs)
    assert "gap: 0.01% (the least seconds of all divisions that the policy allows)" in text
    assert "all_reduce" in text and "blocks.*.up linear" in costs.table(None), text


class Attending(nn.Module):
    """Attention and an MLP, with dropout of probabilities, of hidden values, or without."""

    def __init__(self, attention: float, hidden: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.positions = nn.Parameter(torch.zeros(64, 32))
        self.attention, self.drop = attention, nn.Dropout(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions
        parts = (part.view(*x.shape[:2], 4, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        heads = F.scaled_dot_product_attention(*parts, dropout_p=self.attention)
        x = x + self.drop(self.out(heads.transpose(1, 2).reshape(x.shape)))
        return (x + self.down(self.drop(F.gelu(self.up(x))))).square().sum()


def saved_by_forward(parallel_class: Any, x: torch.Tensor) -> int:
    """Bytes that autograd saves, without parameters and the input; each storage counts once."""
    parallel = parallel_class()
    saved = {t.untyped_storage().data_ptr(): t for t in (*parallel.parameters(), *parallel.buffers(), x)}
    before, kept = set(saved), []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)  # so that no address is used twice
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        parallel(x)
    return sum(tensor.untyped_storage().nbytes() for key, tensor in saved.items() if key not in before)


def attending(attention: float, hidden: float, x: torch.Tensor, ranks: int, folder: Path, device_type: str) -> Any:
    """Returns the parallel class, and what is predicted for a rank to save."""
    config = ComputeConfig(ranks, ranks, pas_config={"costs": replace(EAGER, device_type=device_type)})
    parallel_class = parallelize(
        Attending,
        {"x": x},
        "tp",
        config,
        gen_savedir=folder / f"{attention} {hidden} {device_type}",
        module_fn=lambda: Attending(attention, hidden),
    )
    return parallel_class, explain(parallel_class)["saved_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("attention, hidden", [(0.0, 0.0), (0.0, 0.1), (0.1, 0.0)])
def test_saved_bytes_are_those_of_autograd_with_and_without_dropout(
    attention: float, hidden: float, ranks: int, tmp_path: Path
) -> None:
    x = torch.randn(4, 64, 32)
    parallel_class, predicted = attending(attention, hidden, x, ranks, tmp_path, "cpu")
    for measured in threads.run(ComputeConfig(ranks, ranks).mesh(), saved_by_forward, parallel_class, x):
        assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
def test_a_gpu_saves_masks_of_bool_and_none_of_attention(tmp_path: Path) -> None:
    x = torch.randn(4, 64, 32)
    plain, attention, hidden = (
        attending(*rates, x, 1, tmp_path, "cuda")[1] for rates in [(0.0, 0.0), (0.1, 0.0), (0.0, 0.1)]
    )
    assert attention == plain and hidden == plain + x.numel() + 4 * x.numel()


# Policies and options, what the text has, and the gap.
PLANS: dict[str, tuple[str, str, int, dict[str, Any], str, float | None]] = {
    "pipeline": ("mlp", "pp", 2, {"pipeline_nmicros": 4}, "pp=2: .*\npipeline stages: .*; a step", 0.0),
    "two axes": ("mlp", "tp", 4, {"tp_size": 2}, r"tp=4 \(as 2 x 2\): .*gap: not known \(each axis is divided", None),
    "one rank": ("mlp", "dp", 1, {}, "one rank: .* 0 us collectives", 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_other_plans(name: str, tmp_path: Path) -> None:
    module, policy, ranks, options, text, gap = PLANS[name]
    costs = explain(divided(tmp_path, module, policy, ranks, costs=EAGER, **options))
    assert re.search(text, str(costs), re.DOTALL), costs
    assert costs["gap"] == gap and sum(costs["stage_seconds"]) == pytest.approx(costs["seconds"])


def test_a_limit_of_memory_costs_seconds() -> None:
    graph = IRGraph(mlp(width=64), ComputeConfig(2, 2), costs=H100)
    unlimited = graph.divide()
    held = graph.problem().solve(0.0).held.total()
    graph.memory = held * 0.6
    limited = graph.divide()
    assert unlimited.costs is not None and limited.costs is not None
    free, tight = unlimited.costs(), limited.costs()
    assert (
        tight["parameter_bytes"] + tight["saved_bytes"] <= graph.memory < free["parameter_bytes"] + free["saved_bytes"]
    )
    assert free["gap"] == 0.0 and tight["gap"] == pytest.approx(1 - free["seconds"] / tight["seconds"])


def test_alternatives_of_a_search_that_limits_conversions_are_approximate(tmp_path: Path) -> None:
    costs = explain(divided(tmp_path, "mlp", costs=EAGER))
    assert costs["alternatives_exact"] and "(approximate)" not in str(costs)
    costs["alternatives_exact"] = False
    assert "next best (approximate)" in str(costs)


def test_what_is_no_parallel_module() -> None:
    with pytest.raises(TypeError, match="explain takes a module or class that parallelize returned, got Linear"):
        explain(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the files of ParallelModule have no costs: .* reuse='override'"):
        explain(ParallelModule)

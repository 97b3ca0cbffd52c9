"""Embedding tables that are each whole on one rank: parity, bytes, checkpoints, and where they are chosen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuronx_dist import Mesh, comm
from neuronx_dist.checkpoint.api import load_checkpoint, save_checkpoint
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import (
    ComputeConfig,
    IRGraph,
    build_optimizer,
    composites,
    load_merged_state_dict,
    merge_state_dicts,
    parallelize,
)
from neuronx_dist.parallelize.choose.conversions import WholeOnRank
from neuronx_dist.parallelize.choose.exact import choose
from neuronx_dist.parallelize.choose.whole_tables import _distributed
from neuronx_dist.parallelize.policy.plans import plan_of
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.planning.costs import H100
from neuronx_dist.planning.plan import Plan, PlanError
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.record import record_program
from neuronx_dist.weights.shard_spec import gather_full, spec_of
from tests.parallelize.support.dlrm import BATCH, ROWS, WIDTH, Dlrm, inputs, trained

pytestmark = pytest.mark.slow


class Towers(nn.Module):
    """Tables of `nn.Embedding` of unequal rows and widths, one with a padding index, side by side or stacked."""

    def __init__(self, widths: list[int], *, stacked: bool = False, shared: bool = False) -> None:
        super().__init__()
        paddings = [2 if rows == 12 else None for rows in ROWS]
        self.tables = nn.ModuleList([nn.Embedding(*sizes) for sizes in zip(ROWS, widths, paddings)])
        self.stacked, self.shared = stacked, shared
        self.top = nn.Linear(sum(widths), 3)

    def forward(self, ids: list[Tensor], target: Tensor) -> Tensor:
        rows = [table(x) for table, x in zip(self.tables, ids)]
        if self.shared:
            target = target + self.tables[0](ids[1][:, 0] % ROWS[0]).sum(-1, keepdim=True)
        joined = torch.stack(rows, 2).flatten(2) if self.stacked else torch.cat(rows, -1)
        return F.mse_loss(self.top(joined).sum(1), target)


def towers(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    widths = [6] * 6 if options.get("stacked") else [3, 8, 5, 4, 6, 2, 7]
    arguments = {
        "ids": [torch.randint(rows, (16, 2)) for rows, _ in zip(ROWS, widths)],
        "target": torch.randn(16, 3, dtype=torch.float64),
    }
    return Towers(widths, **options).double(), arguments


def first_frozen() -> tuple[nn.Module, dict[str, Any]]:
    """Returns tables of which the first of the join, and the largest, have no gradient."""
    module, arguments = towers()
    for number in (0, 2):
        module.get_parameter(f"tables.{number}.weight").requires_grad_(False)
    return module, arguments


def dlrm() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Dlrm(ROWS, WIDTH).double(), inputs(ROWS, BATCH)


def whole(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """A policy: tables are whole on ranks."""
    graph.whole_tables("emb_l.*" if graph.select(name="embedding_bag") else "tables.*")
    return graph


def dense(module: nn.Module) -> nn.Module:
    """Returns a copy whose tables have dense gradients, which Adam needs."""
    module = copy.deepcopy(module)
    for child in module.modules():
        if isinstance(child, nn.EmbeddingBag):
            child.sparse = False
    return module


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


CASES = {
    "bags": (dlrm, 2, torch.optim.SGD),
    "bags, 4": (dlrm, 4, torch.optim.Adam),
    "unequal widths": (towers, 2, torch.optim.Adam),
    "first frozen": (first_frozen, 2, torch.optim.SGD),
    "stacked, 4": (lambda: towers(stacked=True), 4, torch.optim.SGD),
}


@pytest.mark.parametrize("case", CASES)
def test_whole_tables_train_as_in_one_process(case: str, tmp_path: Path) -> None:
    """3 steps: losses, all gradients and weights; a rank has its tables alone; one exchange, of the predicted bytes."""
    made, ranks, optimizer = CASES[case]
    module, arguments = made()

    def rank() -> Any:
        parallel: Any = parallelize(module, arguments, whole, ComputeConfig(ranks), gen_savedir=tmp_path)
        with comm.record() as calls:
            parallel(**arguments).backward()
        sent = [call.shape[0] * 8 for call in calls if call.verb == "exchange"]
        held = {name: x.shape[0] for name, x in parallel.named_parameters() if name.endswith("weight")}
        return trained(parallel, arguments, build_optimizer(parallel, optimizer, lr=0.1)), sent, held

    reference = dense(module)
    wanted = trained(reference, arguments, optimizer(reference.parameters(), lr=0.1))
    results = threads.run(Mesh(ranks, tp=ranks), rank)
    for found, _, _ in results:
        assert_equal(found, wanted)
    division = divide(recorded(module, arguments), whole, ComputeConfig(ranks))
    assert division.costs is not None
    (entry,) = [entry for entry in division.costs()["collectives"] if entry["operator"].startswith("inside")]
    assert [len(sent) for _, sent, _ in results] == [2] * ranks
    most = [max(sent) for sent in zip(*(sent for _, sent, _ in results))]
    assert most == [entry["forward_bytes"], entry["backward_bytes"]]
    for name, x in module.named_parameters():
        if name.startswith(("emb_l", "tables")):
            assert sorted(held[name] for _, _, held in results) == [0] * (ranks - 1) + [x.shape[0]]


def recorded(module: nn.Module, arguments: dict[str, Any]) -> Any:
    return decomposed(record_program(module, arguments, training=True))


def test_float32_is_proven_too(tmp_path: Path) -> None:
    """Below float64 the values are compared on tensors of a subclass."""
    module, arguments = towers()
    module, arguments = module.float(), {**arguments, "target": arguments["target"].float()}

    def rank() -> Tensor:
        parallel: Any = parallelize(module, arguments, whole, ComputeConfig(2), gen_savedir=tmp_path)
        return parallel(**arguments)

    for found in threads.run(Mesh(2, tp=2), rank):
        torch.testing.assert_close(found, module(**arguments), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("broken", ["lost", "doubled", "turned"])
def test_a_broken_exchange_is_refused(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, arguments = towers()
    exchange = composites.exchange_rows

    def wrong(rows: Tensor, sizes: list[int], received: list[int], axis: Any) -> Tensor:
        arrived = exchange(rows, sizes, received, axis)
        return {"lost": arrived * 0, "doubled": arrived * 2, "turned": arrived.flip(0)}[broken]

    monkeypatch.setattr(composites, "exchange_rows", wrong)
    with pytest.raises(RuntimeError, match="computes other values than one process"):
        threads.run(
            Mesh(2, tp=2), lambda: parallelize(module, arguments, whole, ComputeConfig(2), gen_savedir=tmp_path)
        )


def test_state_dicts_have_the_original_names_and_load_into_other_layouts(tmp_path: Path) -> None:
    """Adam's state of 4 ranks with whole tables is merged, and goes on on 2 ranks, and in tables cut by width."""
    module, arguments = towers(stacked=True)
    reference = copy.deepcopy(module)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
    trained(reference, arguments, optimizer, 2)

    def first() -> Any:
        parallel: Any = parallelize(module, arguments, whole, ComputeConfig(4), gen_savedir=tmp_path / "4")
        stepper = build_optimizer(parallel, torch.optim.Adam, lr=0.1)
        trained(parallel, arguments, stepper, 2)
        save_checkpoint(tmp_path / "saved", tag="step", model=parallel, optimizer=stepper)
        return parallel.state_dict(), stepper.state_dict()

    states = threads.run(Mesh(4, tp=4), first)
    assert all(list(state) == list(module.state_dict()) for state, _ in states)
    merged, merged_optimizer = merge_state_dicts(*zip(*states))
    assert_equal([*merged.values()], [*reference.state_dict().values()])
    for number, state in optimizer.state_dict()["state"].items():
        assert merged_optimizer is not None
        assert_equal([merged_optimizer["state"][number]["exp_avg"]], [state["exp_avg"]])
    wanted = trained(reference, arguments, optimizer, 2)

    def again(policy: Any, how: str) -> list[Tensor]:
        folder = tmp_path / policy.__name__
        parallel: Any = parallelize(module, arguments, policy, ComputeConfig(2), gen_savedir=folder)
        stepper = build_optimizer(parallel, torch.optim.Adam, lr=0.1)
        if how == "merged":
            load_merged_state_dict(parallel, copy.deepcopy(merged), stepper, copy.deepcopy(merged_optimizer))
        else:
            load_checkpoint(tmp_path / "saved", tag="step", model=parallel, optimizer=stepper)
        return trained(parallel, arguments, stepper, 2)

    def width(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        graph.shard("tables.*", weight=1)
        return graph

    for policy, how in ((whole, "merged"), (width, "merged"), (whole, "file")):
        for found in threads.run(Mesh(2, tp=2), again, policy, how):
            assert_equal(found, wanted)


def test_units_with_zero_train_as_in_one_process(tmp_path: Path) -> None:
    """2 units x 2 ranks, clipped by the norm of all gradients; ZeRO divides the rows of tables that a rank has."""
    module, arguments = towers()
    config = ComputeConfig(2, 4, use_zero=True)

    def steps(module: Any, optimizer: Any, clip: Any) -> list[Tensor]:
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            module(**arguments).backward()
            norms.append(clip().detach())
            optimizer.step()
        return norms + [gather_full(x, spec_of(x)) for x in module.parameters()]

    def rank() -> list[Tensor]:
        parallel: Any = parallelize(module, arguments, whole, config, gen_savedir=tmp_path)
        optimizer: Any = build_optimizer(parallel, torch.optim.Adam, lr=0.1)
        return steps(parallel, optimizer, lambda: optimizer.clip_gnorm(1.0))

    reference = copy.deepcopy(module)
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)

    def clipped() -> Tensor:
        for x in reference.parameters():
            assert x.grad is not None
            x.grad *= 2  # the sum over two units with the same data
        return torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)

    wanted = steps(reference, optimizer, clipped)
    for found in threads.run(Mesh(4, tp=2), rank):
        assert_equal(found, wanted)


def test_evaluation_and_a_plans_file_have_the_same_tables(tmp_path: Path) -> None:
    module, arguments = towers()
    division = divide(recorded(module, arguments), whole, ComputeConfig(2))
    plan_of(division).save(tmp_path / "plan.json")

    def rank() -> tuple[Tensor, Tensor]:
        plan = Plan.load(tmp_path / "plan.json")
        parallel: Any = parallelize(module, arguments, plan, ComputeConfig(2), gen_savedir=tmp_path / "generated")
        parallel.eval()
        with torch.no_grad():
            return parallel(**arguments), parallel.tables[0].weight.shape[0]

    results = threads.run(Mesh(2, tp=2), rank)
    for found, _ in results:
        assert_equal([found], [module(**arguments).detach()])
    assert {rows for _, rows in results} == {0, ROWS[0]}


def test_many_small_tables_are_whole_where_that_takes_the_least_time() -> None:
    """A rank looks up 7 of 26 tables; one table with most rows is cut, as its rank would hold all of it."""
    with torch.device("meta"):
        program = recorded(Dlrm([1000] * 26, 16), inputs([1000] * 26, 2048, torch.float32))
        skewed = recorded(Dlrm([100_000_000, *[1000] * 3], 16), inputs([100_000_000, *[1000] * 3], 2048, torch.float32))
    division = choose(program, "tp", 4, costs=H100)
    tables = [value for value in program.parameters if value.path.startswith("emb_l")]
    ranks = [division.types[value] for value in tables]
    assert all(isinstance(type_, WholeOnRank) for type_ in ranks)
    of_rank = [type_.rank for type_ in ranks if isinstance(type_, WholeOnRank)]
    assert sorted(of_rank.count(rank) for rank in range(4)) == [6, 6, 7, 7]
    types = choose(skewed, "tp", 4, costs=H100).types
    assert not any(isinstance(types[value], WholeOnRank) for value in skewed.parameters)


def test_ranks_have_equally_many_columns_then_equally_many_rows() -> None:
    assert _distributed([100, 90, 20, 10, 5, 5, 1, 1], [4] * 8, 4) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert _distributed([5, 5], [4, 4], 4) == [0, 1]
    assert _distributed([9, 8, 7], [8, 4, 4], 2) == [0, 1, 1]


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(9, 4, mode="sum") for _ in range(2)])

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([table(ids, per_sample_weights=weights) for table in self.tables], 1).sum()


REFUSED = {
    "read twice": lambda: towers(shared=True),
    "weighted": lambda: (Weighted(), {"ids": torch.zeros(4, 3, dtype=torch.int64), "weights": torch.ones(4, 3)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_that_cannot_be_whole_is_refused(case: str) -> None:
    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        graph.whole_tables("tables.*")
        return graph

    with pytest.raises(PlanError, match="tables.0.weight .* cannot be whole on one of 2 ranks"):
        divide(recorded(*REFUSED[case]()), policy, ComputeConfig(2))


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"stages": 2}], ids=["axes", "stages"])
def test_pipelines_and_several_axes_cut_tables(sizes: dict[str, int]) -> None:
    """Neither of them has rows that one rank has: the plan chooses among the other layouts."""
    module, arguments = towers(stacked=True)

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        if "stages" in sizes:
            config.apply_pipeline_scheduler(graph, 2, 2, "1f1b")
        else:
            graph.later.sizes = (2,)
        return graph

    program = recorded(module, arguments)
    division = divide(program, policy, ComputeConfig(4, use_end2end=True))
    assert not any(isinstance(type_, WholeOnRank) for level in division.levels for type_ in level.types.values())


def test_whole_tables_in_a_pipeline_are_refused() -> None:
    module, arguments = towers(stacked=True)

    def policy(graph: IRGraph, config: ComputeConfig) -> IRGraph:
        graph.whole_tables("tables.*")
        config.apply_pipeline_scheduler(graph, 2, 2, "1f1b")
        return graph

    with pytest.raises(PlanError, match="tables.0.weight .* no whole tables in pipelines"):
        divide(recorded(module, arguments), policy, ComputeConfig(4, use_end2end=True))

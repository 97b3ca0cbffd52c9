"""Embedding tables of a recommendation model (DLRM), cut over the ranks by width: parity, bytes, and what is chosen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from neuronx_dist import Mesh, comm
from neuronx_dist.comm import threads
from neuronx_dist.parallelize import ComputeConfig, IRGraph, build_optimizer, parallelize
from neuronx_dist.parallelize.policy.policies import divide
from neuronx_dist.program.decompose import decomposed
from neuronx_dist.program.record import record_program
from neuronx_dist.spmd.types import S
from tests.parallelize.support.dlrm import BATCH, ROWS, WIDTH, Dlrm, inputs, trained

pytestmark = pytest.mark.slow


def exchanging(graph: IRGraph, config: ComputeConfig) -> IRGraph:
    """A policy: tables are cut over width, products of pairs over the batch, so that embeddings are exchanged."""
    graph.shard("emb_l.*", weight=1)
    (bmm,) = graph.select(name="bmm")
    for rank, part in enumerate(graph.partition(bmm, bmm.algorithm("dim"), idx=0, dim=0, num=config.plan_ngpus)):
        graph.assign(part, rank)
    return graph


@pytest.mark.parametrize(
    ("ranks", "policy"), [(2, exchanging), pytest.param(4, "tp", marks=pytest.mark.full)], ids=["exchange", "sums"]
)
def test_a_recommendation_model_trains_as_in_one_process(ranks: int, policy: Any, tmp_path: Path) -> None:
    """3 steps of SGD: losses and all gradients; one all-to-all for all tables."""
    torch.manual_seed(0)
    module, arguments = Dlrm(ROWS, WIDTH).double(), inputs(ROWS, BATCH)

    def rank() -> tuple[list[Tensor], list[Any]]:
        parallel: Any = parallelize(module, arguments, policy, ComputeConfig(ranks), gen_savedir=tmp_path)
        with comm.record() as calls:
            parallel(**arguments)
        exchanged = [call.shape for call in calls if call.verb == "all_to_all"]
        return trained(parallel, arguments, build_optimizer(parallel, torch.optim.SGD, lr=0.1)), exchanged

    whole = copy.deepcopy(module)
    wanted = trained(whole, arguments, torch.optim.SGD(whole.parameters(), lr=0.1))
    for found, exchanged in threads.run(Mesh(ranks, tp=ranks), rank):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
        assert exchanged == [(BATCH, len(ROWS) + 1, WIDTH // ranks)] * (policy == exchanging)


@pytest.mark.parametrize(
    ("ranks", "operator"), [pytest.param(4, "reduce_scatter", marks=pytest.mark.full), (16, "all_to_all")]
)
def test_the_choice_sends_no_more_than_whole_tables_on_ranks(ranks: int, operator: str) -> None:
    """Either sums of the pairs' products, or one exchange for all tables and the dense features, there and back."""
    rows, width, batch = [1_000_000, 40_000, 3_000_000, 700_000] * 6, 128, 65536
    with torch.device("meta"):
        program = decomposed(record_program(Dlrm(rows, width), inputs(rows, batch, torch.float32), training=True))
    division = divide(program, "autodist", ComputeConfig(ranks))
    tables = [value for value in program.parameters if value.path.startswith("emb_l")]
    assert {division.types[value] for value in tables} == {S(1)}  # each rank holds equally much
    assert division.costs is not None
    sent = {entry["operator"]: entry for entry in division.costs()["collectives"] if entry["forward_bytes"] > 1000}
    whole_tables = batch * len(rows) * width * 4 * (ranks - 1) // ranks**2
    assert sum(entry["forward_bytes"] for entry in sent.values()) <= whole_tables * (len(rows) + 2) // len(rows)
    assert operator in sent and sum(entry["times"] for entry in sent.values()) == 2

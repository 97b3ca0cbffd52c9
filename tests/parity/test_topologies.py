"""Training on the rank orders of devices gives what one process gives: nothing takes the linear order for granted."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from neuronx_dist import Mesh, comm
from neuronx_dist.parallel_layers import parallel_state as ps
from tests.parity.layout_cases import CLIP
from tests.support.llama_training import Case, train, worst_difference
from tests.support.pool import processes

pytestmark = pytest.mark.slow

TOLERANCE = 1e-10  # of float64, as in test_layouts.py
CASES = [
    Case(tp=4, dp=2, sequence_parallel=True, optimizer="zero1", microbatches=2, clip=CLIP),
    Case(tp=4, dp=2, heads="padded", labels="empty", evaluate=True),
    Case(tp=4, pp=2, sequence_parallel=True, tied=True, microbatches=2, optimizer="master", clip=CLIP),
]
ON_PROCESSES = [  # groups [0, 3], [1, 2] and [0, 1], [3, 2]
    Case(tp=2, dp=2, sequence_parallel=True, optimizer="zero1", microbatches=2, clip=CLIP),
    Case(tp=2, pp=2, tied=True, microbatches=2, optimizer="zero1", labels="empty", clip=CLIP),
]


def check(case: Case, results: list[Any]) -> None:
    assert case.dtype == torch.float64
    worst, what = worst_difference(case, results)
    assert worst < TOLERANCE, f"{case}: {what} differs by {worst:.2e} from one process"


@pytest.mark.each_value
@pytest.mark.parametrize("topology", ["trn1", "trn2"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_one_process(case: Case, topology: str) -> None:
    mesh = Mesh(8, tp=case.tp, pp=case.pp, topology=topology, ranks_per_node=8)
    check(case, comm.threads.run(mesh, train, case))


def train_on_trn2(case: Case) -> Any:
    os.environ["LOCAL_WORLD_SIZE"] = "4"
    try:
        ps.initialize_model_parallel(case.tp, case.pp, topology="trn2")
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    assert ps.get_mesh() == Mesh(4, tp=case.tp, pp=case.pp, topology="trn2", ranks_per_node=4)
    return train(case)


@pytest.mark.parametrize("case", ON_PROCESSES, ids=str)
def test_on_processes(case: Case) -> None:
    check(case, processes(4).run(train_on_trn2, case, initialize=False))

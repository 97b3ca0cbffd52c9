"""Every layout gives what one process gives: losses, gradients, norms, weights after two steps of SGD or of AdamW.

The metric is ||a - b|| / ||b|| of each tensor. In float64 what is left is rounding, so that 1e-10 finds any mistake;
float32 is run as well, because users do. `make test` runs a set that has every layout once and every pair of options,
degrees and the update (SGD, AdamW) included; NXD_FULL=1 all of them.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from neuronx_dist import comm, hf
from tests.parity.layout_cases import (
    CLIP,
    FACTORS,
    LAYOUTS,
    SCHEDULES,
    all_pairs,
    covering_set,
    float32_cases,
    pairs_of,
    schedule_matrix,
    whole_matrix,
    with_updates_in_turn,
)
from tests.support.llama_training import Case, reference, train, worst_difference
from tests.support.pool import processes

pytestmark = pytest.mark.slow

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
COVERING = covering_set()
# Of one parallel axis alone only NXD_FULL=1 runs float32: the axis occurs beside each other one.
FLOAT32 = [c for c in float32_cases() if os.environ.get("NXD_FULL") or (c.tp, c.pp, c.dp).count(1) < 2]
FULL = [*whole_matrix(), *schedule_matrix()] if os.environ.get("NXD_FULL") else []
in_turn = list if FULL else with_updates_in_turn


def check(case: Case, results: list[Any]) -> None:
    worst, what = worst_difference(case, results)
    print(f"worst difference {worst:.1e}: {what}")  # pytest -rP shows it
    assert worst < TOLERANCE[case.dtype], f"{case}: {what} differs by {worst:.2e} from one process"


ONE_KEY_VALUE_HEAD = [
    Case(tp=2, dp=2, heads="one kv", optimizer="zero1", microbatches=2, clip=CLIP),
    Case(tp=2, pp=2, heads="one kv", sequence_parallel=True, tied=True, microbatches=2),
    Case(tp=4, heads="one kv", sequence_parallel=True, optimizer="master", clip=CLIP),
    Case(tp=4, dp=2, heads="one kv", evaluate=True),
]


ACCUMULATED = [
    Case(tp=2, pp=2, dp=2, sequence_parallel=True, tied=True, optimizer="zero1", calls=2, microbatches=2, clip=CLIP),
    Case(tp=2, dp=2, sequence_parallel=True, optimizer="plain", calls=4, clip=CLIP, checkpointed=True),
    Case(pp=2, dp=2, tied=True, optimizer="master", calls=2, microbatches=4, labels="empty"),
    Case(pp=2, tp=2, sequence_parallel=True, tied=True, microbatches=4, checkpointed=True),
]


# Schedules have parity tests in tests/pipeline, too: with NXD_FULL=1 all of these.
OTHERS = in_turn(ONE_KEY_VALUE_HEAD + ACCUMULATED + SCHEDULES)[:: 1 if FULL else 2]


@pytest.mark.parametrize("case", COVERING + OTHERS, ids=str)
def test_as_one_process(case: Case) -> None:
    check(case, comm.threads.run(case.mesh, train, case))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", in_turn(FLOAT32), ids=str)
def test_as_one_process_in_float32(case: Case) -> None:
    check(case, comm.threads.run(case.mesh, train, case))


@pytest.mark.full
@pytest.mark.parametrize("case", FULL or COVERING[:1], ids=str)
def test_whole_matrix(case: Case) -> None:
    check(case, comm.threads.run(case.mesh, train, case, timeout=240.0))


def test_the_cases_cover_every_layout_and_every_pair_of_options() -> None:
    assert len(LAYOUTS) == 17 and len(COVERING) <= 24
    covered = set().union(*(pairs_of(tuple(getattr(case, name) for name in FACTORS)) for case in COVERING))
    factors = list(FACTORS)
    missing = [f"{factors[i]}={a} with {factors[j]}={b}" for i, a, j, b in all_pairs() - covered]
    assert missing == []
    every_pair = sum(len(a) * len(b) for a, b in itertools.combinations(FACTORS.values(), 2))
    assert len(all_pairs()) == every_pair - 3  # 4 x 4 ranks of each two degrees are too many
    assert {(c.tp, c.pp, c.dp) for c in COVERING if c.evaluate} == set(LAYOUTS)


CORNERS = [
    Case(tp=2, heads="padded", clip=CLIP),
    Case(dp=2, optimizer="zero1", labels="empty", microbatches=2, clip=CLIP),
    Case(tp=2, dp=2, sequence_parallel=True, optimizer="zero1", heads="padded", microbatches=2),
    Case(pp=4, microbatches=4, labels="empty"),
    Case(tp=4, sequence_parallel=True, heads="replicated", optimizer="zero1", clip=CLIP),
    Case(tp=2, pp=2, sequence_parallel=True, microbatches=2, dtype=torch.float32, clip=CLIP),
    Case(tp=2, pp=2, sequence_parallel=True, microbatches=4, tied=True, schedule="zb_v", clip=CLIP),
    Case(pp=2, dp=2, optimizer="zero1", microbatches=4, tied=True, schedule="interleaved", evaluate=True),
]
OTHER_CORNERS = [
    Case(pp=2, tied=True, microbatches=4),
    Case(tp=2, pp=2, sequence_parallel=True, tied=True, microbatches=4, optimizer="master", evaluate=True),
    Case(pp=2, dp=2, tied=True, optimizer="zero1", labels="empty", microbatches=2, clip=CLIP),
    Case(tp=4, sequence_parallel=True, tied=True, clip=CLIP),
    Case(dp=4, optimizer="zero1", heads="padded"),
]


@pytest.mark.parametrize("case", CORNERS + OTHER_CORNERS if FULL else in_turn(CORNERS), ids=str)
def test_on_processes(case: Case) -> None:
    results = processes(case.mesh.world_size).run(train, case, mesh=dict(tp=case.tp, pp=case.pp))
    check(case, results)


# --- what has no mean -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(tp=2, sequence_parallel=True),
        Case(dp=2, microbatches=2, optimizer="zero1"),
        Case(pp=2, tied=True, microbatches=2),
    ],
    ids=str,
)
def test_without_any_label_the_loss_and_the_gradients_are_zero(case: Case) -> None:
    case = replace(case, labels="none", evaluate=True)
    results = comm.threads.run(case.mesh, train, case)
    for reports in results:
        for report in reports.values():
            assert report.losses == report.norms == [0.0] * len(report.losses) and report.held_out == 0.0
            assert all(not grad.any() for table in report.gradients.values() for grad in table.values())
    assert worst_difference(case, results)[0] < TOLERANCE[case.dtype]  # weight decay goes on


# --- the same twice ---------------------------------------------------------------------------------------------------

TWICE = [
    Case(tp=2, dp=2, sequence_parallel=True, optimizer="zero1", microbatches=2, heads="padded", clip=CLIP),
    Case(tp=2, pp=2, tied=True, microbatches=4),
    Case(dp=4, optimizer="plain"),
]


def train_from_seed(case: Case) -> Any:
    """Two runs of this rank from weights that a seed gives."""
    from tests.support import llama_training

    def run() -> Any:
        model = llama_training.build(case)
        hf.materialize(model, seed=5)
        before = hf.full_state_dict(model)
        params = list(model.local_parameters())
        optimizer = llama_training.make_optimizer(case, "adamw", params)
        losses = []
        for step in range(3):
            losses.append(float(model.run_train(**llama_training.inputs(case, step))))
            losses.append(float(llama_training.step_of(case, optimizer, params)))
            optimizer.zero_grad()
        return losses, before, hf.full_state_dict(model)

    return run(), run()


@pytest.mark.each_value
@pytest.mark.parametrize("where", ["threads", "processes"])
@pytest.mark.parametrize("case", TWICE, ids=str)
def test_the_same_seed_and_layout_twice_is_bit_equal(case: Case, where: str) -> None:
    if where == "threads":
        results = comm.threads.run(case.mesh, train_from_seed, case)
    else:
        results = processes(case.mesh.world_size).run(train_from_seed, case, mesh=dict(tp=case.tp, pp=case.pp))
    for (losses, before, after), (losses_again, before_again, after_again) in results:
        assert losses == losses_again
        for name in after:
            assert torch.equal(before[name], before_again[name]) and torch.equal(after[name], after_again[name]), name
            assert torch.equal(after[name], results[0][0][2][name]), f"{name} differs between ranks"


def test_the_reference_learns() -> None:
    """A parity of two runs that do nothing would be worth nothing."""
    report = reference(Case().options, "sgd")
    start = reference(Case().options, "sgd", 1)
    assert report.losses[-1] < report.losses[0]
    assert all(not torch.equal(report.weights[name], start.weights[name]) for name in report.weights)

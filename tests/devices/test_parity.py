"""Training on imitated devices gives what one process gives: layouts, schedules, ZeRO-1 with and without overlap."""

from __future__ import annotations

import pytest
import torch

from tests.optimizer.overlap_training import Chain, steps, zero1
from tests.parity.layout_cases import CLIP
from tests.support.llama_training import Case, train, worst_difference
from tests.support.pool import processes

pytestmark = pytest.mark.slow

CASES = [
    ("neuron", Case(tp=2)),
    ("neuron_single", Case(tp=2, sequence_parallel=True, tied=True, heads="padded", clip=CLIP)),
    ("tpu_dist", Case(tp=2, sequence_parallel=True)),
    ("neuron", Case(pp=2, tied=True, microbatches=4)),
    ("neuron_single", Case(pp=2, microbatches=4, schedule="interleaved", tied=True)),
    ("tpu_dist", Case(pp=2, microbatches=4, schedule="zb_h1", tied=True)),
    ("neuron", Case(pp=2, microbatches=4, schedule="zb_v", evaluate=True)),
    ("tpu_dist", Case(pp=2, microbatches=2, schedule="gpipe")),
    ("neuron", Case(dp=2, optimizer="zero1", microbatches=2, clip=CLIP)),
    ("tpu_dist", Case(dp=2, optimizer="zero1", heads="padded", labels="empty")),
    ("neuron", Case(tp=2, pp=2, sequence_parallel=True, tied=True, microbatches=4)),
    ("tpu_dist", Case(pp=2, dp=2, optimizer="zero1", microbatches=4, schedule="interleaved", clip=CLIP)),
    ("neuron_single", Case(pp=4, microbatches=4, schedule="zb_v", tied=True, dtype=torch.float32)),
    ("neuron", Case(tp=2, dp=2, optimizer="zero1", sequence_parallel=True, dtype=torch.float32)),
]


@pytest.mark.parametrize("backend, case", CASES, ids=str)
def test_as_one_process(backend: str, case: Case) -> None:
    mesh = dict(tp=case.tp, pp=case.pp)
    results = processes(case.mesh.world_size).run(train, case, ("adamw",), mesh=mesh, backend=backend)
    worst, what = worst_difference(case, results)
    assert worst < {torch.float64: 1e-10, torch.float32: 1e-5}[case.dtype], f"{case} on {backend}: {what}: {worst:.1e}"


def overlapped(optimizer: str) -> None:
    """Trains with overlap and without, and compares all weights, bit by bit."""
    models = []
    for overlap in (False, True):
        model = Chain()
        steps(model, zero1(model, overlap, optimizer))
        models.append(model)
    for (name, x), y in zip(models[0].named_parameters(), models[1].parameters()):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("backend", ["neuron", "neuron_single", "tpu_dist"])
def test_zero1_overlaps_to_the_same_bits(backend: str) -> None:
    processes(2).run(overlapped, "AdamW", backend=backend)

"""Training steps of a Llama in pipeline stages, each a program of its own, against gloo processes and one process."""

from __future__ import annotations

from collections import Counter

import pytest

from neuronx_dist.mesh import Mesh
from tests.support.llama_training import distance, reference
from tests.xla.programs import training as programs
from tests.xla.programs.training import Training
from tests.xla.training_parity import TOLERANCE, assert_trains_as_elsewhere, replayed

TRANSFERS = [("pp_forward", "{{0,2},{1,3}}"), ("pp_backward", "{{2,0},{3,1}}")]
CASES = {
    "pp2 dp2, zero1 adamw, 4 microbatches": (dict(pp=2), Training("adamw", "zero1", microbatches=4)),
    "pp2 tp2, plain sgd, tied, sequence parallel": (
        dict(pp=2, tp=2),
        Training("sgd", "plain", tied=True, sequence_parallel=True, microbatches=2),
    ),
    "pp4, master sgd, 2 microbatches": (dict(pp=4), Training("sgd", "master", microbatches=2, layers=4)),
    "pp2 dp2, interleaved, zero1 adamw, 4 microbatches": (
        dict(pp=2),
        Training("adamw", "zero1", microbatches=4, layers=4, schedule="interleaved", chunks=2),
    ),
    "pp2 tp2, zb_h1, plain sgd, tied, sequence parallel": (
        dict(pp=2, tp=2),
        Training("sgd", "plain", tied=True, sequence_parallel=True, microbatches=2, schedule="zb_h1"),
    ),
    "pp4, zb_v, master sgd, 4 microbatches": (
        dict(pp=4),
        Training("sgd", "master", microbatches=4, layers=8, schedule="zb_v", chunks=2),
    ),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_trains_as_under_gloo_and_in_one_process(name):
    sizes, case = CASES[name]
    assert_trains_as_elsewhere(case, **sizes)


def test_a_task_is_a_program_and_a_transfer_another():
    """Over three steps: one program for each stage and kind of task, and for each direction of transfers."""
    sizes, case = CASES["pp2 tp2, plain sgd, tied, sequence parallel"]
    found = replayed(Mesh(4, **sizes), case)
    assert found.compiled[1:] == [found.compiled[1], 0]
    step = [(found.programs[run.program], run) for run in found.runs[-1]]
    transfers = [run.program for program, run in step if program.collectives and run.ranks == (0, 1, 2, 3)]
    kinds = Counter(str(found.programs[number].collectives[0]).split(" over ")[1] for number in transfers)
    # Two microbatches forward and back; tied weights; the norm over stages, and the loss from the last one.
    assert [kinds[f"{axis} {pairs}"] for axis, pairs in TRANSFERS] == [2, 2]
    for program, run in step:
        if run.ranks == (0, 1, 2, 3):
            assert len(program.collectives) == 1  # alone in its program
        else:
            assert run.ranks in ((0, 1), (2, 3))
            assert all(c.groups == ((0, 1), (2, 3)) for c in program.collectives)
    for stage in ((0, 1), (2, 3)):
        ran = Counter(run.program for _, run in step if run.ranks == stage)
        assert sorted(count for count in ran.values() if count > 1) == [2, 2]  # forward and backward, twice each


# Kinds of tasks (F and B, or F, I and W), and ways of transfers: in a ring of two stages there and back are the same.
PROGRAMS = {"interleaved": (2, 1), "zb_h1": (3, 2), "zb_v": (3, 2)}


@pytest.mark.parametrize("name", [name for name, (_, case) in CASES.items() if case.schedule])
def test_in_every_schedule_a_chunk_has_a_program_for_each_kind_of_task(name):
    """Chunks of the middle, which are alike, share theirs. After the second step nothing is compiled."""
    sizes, case = CASES[name]
    found = replayed(Mesh(4, **sizes), case)
    assert found.compiled[2] == 0
    kinds, ways = PROGRAMS[case.schedule]
    step = [(found.programs[run.program], run) for run in found.runs[-1]]
    between = {run.program: program.collectives for program, run in step if run.ranks == (0, 1, 2, 3)}
    assert all(len(collectives) == 1 for collectives in between.values())  # alone in its program
    assert sum(collectives[0].kind == "collective-permute" for collectives in between.values()) == ways
    tasks = kinds * case.chunks * case.microbatches
    ranks = 4 // sizes["pp"]
    for first in range(0, 4, ranks):
        stage = tuple(range(first, first + ranks))
        ran = Counter(run.program for _, run in step if run.ranks == stage)
        of_tasks = [count for count in ran.values() if count > 1]  # the others come before and after the schedule
        assert sum(of_tasks) == tasks and len(of_tasks) <= kinds * case.chunks
        assert all(count % case.microbatches == 0 for count in of_tasks)


def test_a_pipeline_on_devices_without_a_collective_permute():
    """Pairs of ranks gather what neighbours send; of four stages first the even pairs, then the odd ones."""
    sizes, case = CASES["pp4, master sgd, 2 microbatches"]
    found = replayed(Mesh(4, **sizes), case, steps=2, setup=programs.setup_by_gathering)
    alone = reference(case.options, case.optimizer, 2)
    for rank in range(4):
        assert all(distance(float(found.outputs[rank][k]["loss"]), alone.losses[k]) <= TOLERANCE for k in range(2))
        assert all(distance(float(found.outputs[rank][k]["norm"]), alone.norms[k]) <= TOLERANCE for k in range(2))
    kinds = {(c.kind, c.groups) for p in found.programs for c in p.collectives if (c.axis or "").startswith("pp_")}
    assert kinds == {("all-gather", ((0, 1), (2, 3))), ("all-gather", ((1, 2), (3, 0)))}

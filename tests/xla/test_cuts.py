"""Several programs instead of one: what is alive at a cut goes over, stages have programs of their own."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import ProgramsDiffer, lower, replay, replay_loop
from tests.xla.compare import assert_close, draw, on_threads, same_as_threads
from tests.xla.programs import cuts as programs

TP2 = Mesh(4, tp=2)
STAGES = Mesh(4, tp=2, pp=2)
FIRST, SECOND, ALL = (0, 1), (2, 3), (0, 1, 2, 3)


@pytest.mark.parametrize("cuts", [0, 1, 2, 3])
def test_a_function_that_is_cut_computes_the_same(cuts):
    arguments = [(draw(4, 8).requires_grad_(), cuts)] * 4
    found = same_as_threads(programs.forward_and_backward, TP2, arguments)
    assert [run.ranks for run in found.runs] == [ALL] * (cuts + 1)
    assert len(found.programs) == cuts + 1
    collectives = [len(program.collectives) for program in found.programs]
    assert sum(collectives) == 2 and collectives[-1] == (2 if cuts == 0 else 1 if cuts == 1 else 0)


def test_what_was_computed_before_a_cut_is_not_computed_again():
    whole = replay(programs.forward_and_backward, TP2, [(draw(4, 8).requires_grad_(), 0)] * 4)
    cut = replay(programs.forward_and_backward, TP2, [(draw(4, 8).requires_grad_(), 3)] * 4)

    def products(program):
        return program.text.count(" dot(")

    assert sum(map(products, cut.programs)) == products(whole.program) == 6


def test_a_view_of_a_tensor_that_python_never_met_is_not_computed_again():
    found = same_as_threads(programs.gradient_that_is_a_view, TP2, [(draw(4, 8).requires_grad_(),)] * 4)
    assert [program.text.count(" exponential(") for program in found.programs] == [1, 0, 0]


def test_a_layer_alone_keeps_its_weight_and_no_transposed_copy():
    found = replay(programs.forward_and_backward, Mesh(1), [(draw(4, 8).requires_grad_(), 1)])
    results = found.programs[0].text.splitlines()[-3:]
    assert any("ROOT" in line for line in results) and not any("{0,1}" in line for line in results)


def test_each_stage_has_programs_of_its_own():
    arguments = [(draw(4, 8, seed=rank // 2),) for rank in range(4)]
    found = same_as_threads(programs.two_stages, STAGES, arguments)
    ranks = [run.ranks for run in found.runs]
    assert [r for r in ranks if r != ALL] and ranks.count(ALL) == 3  # two transfers and a sum
    assert {FIRST, SECOND, ALL} == set(ranks)
    for run in found.runs:
        collectives = found.programs[run.program].collectives
        if run.ranks == ALL:  # alone in its program
            assert [c.kind for c in collectives] in (["collective-permute"], ["all-reduce"])
        else:
            assert all(c.groups == ((0, 1), (2, 3)) for c in collectives)  # of the whole world, whoever runs it


def test_ranks_of_a_stage_must_have_one_program():
    with pytest.raises(ProgramsDiffer, match="rank 3 and rank 2 would run different programs in step 0"):
        lower(programs.differs_in_a_stage, STAGES, [(draw(4, 3),)] * 4)


def test_ranks_that_wait_for_each_other_are_named():
    with pytest.raises(ProgramsDiffer, match="wait for each other forever") as found:
        lower(programs.one_transfer_too_many, STAGES, [(draw(4, 3),)] * 4)
    text = str(found.value)
    assert "rank 1: program 1, which ranks 0, 1, 2, 3 run together: collective-permute f32[4, 3] over pp" in text
    assert "rank 0: the end, after 1 programs" in text and "in one_transfer_too_many" in text


def test_a_loop_of_several_programs():
    batches = [[(draw(4, 8, seed=step),) for step in range(3)]] * 4
    found = replay_loop(programs.loop_with_syncs, TP2, [(draw(4, 8),)] * 4, batches)
    assert found.compiled == [2, 0, 0] and [len(runs) for runs in found.runs] == [2, 2, 2]

    def plainly(x):
        step, state = programs.loop_with_syncs(x)
        return [step(*batch) for batch in batches[0]], {k: v.detach() for k, v in state().items()}

    for rank, (outputs, state) in enumerate(on_threads(plainly, TP2, [(draw(4, 8),)] * 4)):
        assert_close(found.outputs[rank], outputs)
        assert_close({name[2:-2]: value for name, value in found.states[rank].items()}, state)
        assert float(found.outputs[rank][2]["running"]) == pytest.approx(sum(float(o["loss"]) for o in outputs), 1e-5)


X = draw(4, 8)


@pytest.mark.parametrize(
    "function, message",
    [
        (programs.reads_behind_a_cut, r"__float__\(\) read a value"),
        (programs.copies_behind_a_cut, "a value was copied to the host"),
        (programs.copies_into_the_host, "a value was copied to the host"),
        (programs.changes_a_viewed_tensor, r"of shape \(4, 8\) or its view of shape \(8,\) was changed in place"),
        (programs.changes_what_was_saved, "was changed in place after it was saved"),
        (programs.keeps_in_the_module, r"shape \(4, 8\) is still alive after its rank's replay"),
        (programs.fails_on_one_rank, "^rank 2: no such token: 17"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_cannot_be_replayed_is_refused(function, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        lower(function, TP2, [(X.clone().requires_grad_(function is programs.changes_what_was_saved),)] * 4)


def test_values_in_the_set_up():
    found = replay_loop(programs.set_up_reads, TP2, [(X,)] * 4, [[()]] * 4)
    assert torch.allclose(found.outputs[3][0], X * (2 * X).sum())
    with pytest.raises(RuntimeError, match="rank 0: __float__.*a result of an earlier program"):
        replay_loop(programs.set_up_reads_a_sum, TP2, [(X,)] * 4, [[()]] * 4)


def test_an_input_that_is_changed_behind_a_program():
    batches = [[(draw(4, 8, seed=step),) for step in range(3)]] * 4
    found = replay_loop(programs.update_of_an_input, TP2, [(X,)] * 4, batches)
    inputs = [X, *(batch for (batch,) in batches[0])]
    for step in range(3):
        assert torch.allclose(found.outputs[1][step], inputs[step] + inputs[step + 1])


@pytest.mark.parametrize("pairs", [[(0, 1)], [(1, 2)], [(3, 0), (0, 1)]])
def test_a_permutation_may_leave_stages_out(pairs):
    found = same_as_threads(programs.permutes_some_stages, Mesh(4, pp=4), [(draw(3, seed=r), pairs) for r in range(4)])
    assert [run.ranks for run in found.runs if found.programs[run.program].collectives] == [ALL]


def test_a_group_of_one_stage_beside_a_permutation():
    same_as_threads(programs.permutes_beside_a_group, STAGES, [(draw(3, seed=rank),) for rank in range(4)])


def test_collectives_without_groups_are_over_the_world():
    found = replay(programs.sums_without_groups, STAGES, [(torch.ones(2) * rank,) for rank in range(4)])
    assert all(torch.equal(x, torch.full((2,), 6.0)) for x in found.outputs)


def test_steps_of_torch_xla_cut():
    found = replay(programs.in_steps, TP2, [(X,)] * 4)
    assert len(found.runs) == 2 and torch.equal(found.outputs[0], X * 2 + 1)


@pytest.mark.parametrize(
    "batches, message",
    [
        ([[(X,)]], r"batches: got lists for 1 ranks, of \[1\] steps"),
        ([[(X,)], [(X,)], [(X,)], []], r"of \[1, 1, 1, 0\] steps"),
        ([[X]] * 4, "batch 0 of rank 0: must be a tuple"),
    ],
)
def test_batches_must_fit(batches, message):
    with pytest.raises((ValueError, TypeError), match=message):
        replay_loop(programs.loop_with_syncs, TP2, [(X,)] * 4, batches)
    with pytest.raises(TypeError, match="must return two functions"):
        replay_loop(programs.sums_without_groups, Mesh(1), [(X,)], [[]])

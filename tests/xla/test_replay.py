"""Findings of a replay: programs that differ between ranks, groups that fit no mesh, values read on the host."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import autograd_linear
from neuronx_dist.xla_replay import ProgramsDiffer, ReplicaGroupsWrong, lower, replay, replay_loop
from tests.support.paths import file_name
from tests.xla.compare import draw
from tests.xla.programs import layers as programs

TP2 = Mesh(4, tp=2)


def line_of(function, text: str) -> str:
    """`file:line` of the line of a function that contains `text`."""
    import inspect

    lines, first = inspect.getsourcelines(function)
    return f"{inspect.getsourcefile(function)}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def test_a_slice_at_the_rank_is_found_with_its_line():
    with pytest.raises(ProgramsDiffer) as found:
        replay(programs.slices_by_rank, TP2, [(draw(4, 3),)] * 4)
    text = str(found.value)
    assert "rank 1 and rank 0" in text and "slice={[0:4], [0:3]}" in text and "slice={[1:4], [0:3]}" in text
    assert line_of(programs.slices_by_rank, "the rank becomes") in text
    assert "communicator.coordinate" in text


def test_a_collective_that_one_rank_skips_is_found_with_its_line():
    with pytest.raises(ProgramsDiffer) as found:
        replay(programs.skips_a_collective, TP2, [(draw(4, 3),)] * 4)
    text = str(found.value)
    assert "the first differing collective is number 1" in text and "rank 1: has no more" in text
    assert "all_reduce float32[4, 3] over dp" in text
    assert line_of(programs.skips_a_collective, '"dp")') in text


def test_groups_that_are_of_no_axis_are_found():
    with pytest.raises(ReplicaGroupsWrong, match=r"\{\{0,3\},\{1,2\}\}.*not the groups of an axis of Mesh"):
        lower(programs.wrong_groups, TP2, [(draw(4, 3),)] * 4)


def test_a_value_read_on_the_host_is_an_error_not_a_hang():
    with pytest.raises(RuntimeError, match="float.*depends on the result of an all-reduce"):
        lower(programs.reads_a_value, TP2, [(draw(4, 3),)] * 4)
    assert lower(programs.fused, TP2, [(draw(6, 16).requires_grad_(),)] * 4).collectives  # the process goes on


def test_arguments_must_be_there_for_every_rank():
    with pytest.raises(ValueError, match="1 lists of arguments for 4 ranks"):
        lower(programs.fused, TP2, [(draw(6, 16),)])


def test_the_table_of_collectives():
    program = replay(programs.pair, TP2, [({}, draw(8, 4, 16).requires_grad_())] * 4)
    lines = program.table().splitlines()
    assert len(lines) == 4 and lines[0].split() == ["#", "collective", "axis", "operand", "bytes", "groups", "from"]
    for cell in ("all-reduce add", "f32[8, 4, 16]", "2,048", "0-1 2-3", file_name(autograd_linear)):
        assert cell in lines[1]


def test_a_world_of_one_has_no_collectives():
    replayed = replay(programs.pair, Mesh(1), [({}, draw(8, 4, 16).requires_grad_())])
    assert replayed.program.collectives == [] and torch.isfinite(replayed.outputs[0]["loss"])


def test_a_set_up_that_differs_between_ranks_is_found():
    with pytest.raises(ProgramsDiffer, match="rank 1 and rank 0"):
        replay_loop(programs.set_up_by_rank, TP2, [(draw(4, 3),)] * 4, [[()]] * 4)


def test_a_set_up_may_communicate():
    found = replay_loop(programs.set_up_by_communicating, TP2, [(draw(4, 3) * rank,) for rank in range(4)], [[()]] * 4)
    for rank in range(4):
        assert torch.allclose(found.outputs[rank][0], draw(4, 3).sum() * (1.0, 5.0)[rank // 2])


def test_a_loop_carries_what_it_changes():
    batches = [[(torch.tensor([float(rank + step)]),) for step in range(3)] for rank in range(4)]
    found = replay_loop(programs.counting, TP2, [(torch.full((2,), float(rank)),) for rank in range(4)], batches)
    sums = [1.0, 1.0 + 3.0, 1.0 + 3.0 + 5.0], [5.0, 5.0 + 7.0, 5.0 + 7.0 + 9.0]
    for rank in range(4):
        assert [float(step["count"]) for step in found.outputs[rank]] == sums[rank // 2]
        assert all(torch.equal(step["before"], torch.full((2,), 2.0 * rank)) for step in found.outputs[rank])
        assert float(found.states[rank]["['count']"]) == sums[rank // 2][-1]
    assert len(found.programs) == 1 and found.host_reads == [0, 0, 0]

"""The first repair that is an edit, applied again and again, leads to a program that is right.

Right is: the loss and all gradients of one process. That the checker is content is not enough.
"""

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, S, SpmdTypeError, SpmdTypeMode, all_gather, all_to_all, assert_type
from tests.checking.types.messages import buggy_programs, programs  # noqa: F401 - fill the tables
from tests.checking.types.messages.running import BUGGY, PROGRAMS, converge, parity
from tests.checking.types.messages.test_messages import POSITIONS, TOLERANCE

pytestmark = pytest.mark.slow

ROUNDS = 4
layers_of_which_one_is_reduced = buggy_programs.DIFFERING["layers_of_which_one_is_reduced"]
# What has to be repaired in another place than where it is found is told in words: `test_messages` repairs it by hand.
ALL = {
    **{name: program for name, program in PROGRAMS.items() if program.numeric and program.repaired is None},
    **BUGGY,
}


def test_there_are_many():
    assert len(ALL) >= 79 and len(BUGGY) >= 39


@POSITIONS
@pytest.mark.parametrize("name", ALL)
def test_first_edits_lead_to_the_program_of_one_process(name, tmp_path):
    program = ALL[name]
    end = converge(program, tmp_path, ROUNDS)
    text = "\n".join([*map(str, end.errors), *end.applied])
    assert end.errors, "nothing was found"
    assert program.rounds == 1 or len(end.errors) == program.rounds, text
    assert end.loss_type is not None, text
    assert parity(program, end.body, end.loss_type) <= TOLERANCE, text
    before = parity(program, program.body, end.loss_type)
    assert before <= TOLERANCE if program.same else before > 1e-4, before
    for repair in (repair for error in end.errors for repair in error.repairs):  # what only the author knows is no edit
        assert not (repair.startswith("spmd.forget") and repair.edits), repair


@POSITIONS
@pytest.mark.parametrize("name", [name for name in BUGGY if name.startswith(("penalty", "norm_of", "norms_of"))])
def test_a_loop_is_repaired_for_all_its_parameters_at_once(name, tmp_path):
    """Not for the one at hand, which is wrong for the next: that flipped without end."""
    end = converge(BUGGY[name], tmp_path, ROUNDS)
    assert any('if spmd.spec_of(w).axis == "tp" else' in code or "spec_of(param)" in code for code in end.applied)
    lines = [edit.start[0] for repair in end.applied for edit in repair.edits]
    assert len(lines) == len(set(lines)), end.applied  # no line is repaired twice


@POSITIONS
def test_a_loop_over_layers_that_differ_does_not_flip(tmp_path):
    """A sum added to both of two layers, one of which lacks it, would be one too many for the other."""
    end = converge(layers_of_which_one_is_reduced, tmp_path, ROUNDS)
    assert end.loss_type is None and len(end.applied) == 1
    assert "if it is in every iteration; otherwise make the types equal first" in str(end.errors[-1])


def test_two_shards_of_one_name_are_told_apart():
    """The message was once: "it is S(0), not S(0)"."""
    mesh = Mesh(2, tp=2)
    with comm.as_rank(mesh, 0), SpmdTypeMode(mesh):
        x = assert_type(torch.randn(4, 6), {"tp": S(0)})
        assert_type(x.view(2, 2, 6).flatten(0, 1), {"tp": S(0)})  # merged of two dims: still the same shard
        with pytest.raises(SpmdTypeError, match=r"x is S\(0\) already, and an exchange along the same dim"):
            all_to_all(x, "tp", src=S(0), dst=S(0))
        blocks = assert_type(torch.randn(4, 6), {"tp": S(0, stride=2)})
        with pytest.raises(SpmdTypeError, match="one in 2 blocks, each sharded by itself, the other in one piece"):
            x + blocks
        with pytest.raises(SpmdTypeError, match=r"dim 0 of the one and dim 0 of the other are sharded, which outer"):
            torch.outer(x[:, 0], x[:, 0])
        with pytest.raises(SpmdTypeError, match="dim 0 is 2 blocks"):
            all_gather(blocks, "tp", src=S(-2), dst=I)

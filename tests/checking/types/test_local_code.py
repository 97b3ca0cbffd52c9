"""Code that works on this rank's own part: what is right passes, what looks like it and is wrong does not.

What is said to be right or wrong here is run on ranks, and compared with one process.
"""

from __future__ import annotations

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends.observed import CheckBackend
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from tests.checking.types.local_programs import CASES, experts_of_this_rank
from tests.checking.types.messages.running import backwards, local, mesh_of, parity, values


def check(program):
    """The type of the loss, and what the mode lists."""
    mesh = mesh_of(program.mesh)
    with comm.as_rank(mesh, 0, CheckBackend()):
        with spmd.no_typecheck():
            given = {name: local(program.inputs[name], value) for name, value in values(program).items()}
        with spmd.SpmdTypeMode(mesh) as mode:
            for name, x in given.items():
                spmd.assert_type(x, {**{axis: R for axis in program.mesh}, **program.inputs[name].types})
            loss = program.body(**given)
            kinds = spmd.get_local_type(loss)
            if not backwards(program):
                loss.backward()
    return kinds, [*mode.assumed, *mode.trusted]


@pytest.mark.parametrize("name", CASES)
def test_local_code(name):
    case = CASES[name]
    if case.refused:
        with pytest.raises(SpmdTypeError) as error:
            check(case.program)
        assert case.refused in str(error.value)
        return
    kinds, listed = check(case.program)
    for words in case.listed:
        lines = [line for text, line in listed if words in text]
        assert lines and all("local_programs.py" in line for line in lines), listed


@pytest.mark.parametrize("name", CASES)
def test_what_is_right_and_what_is_not(name):
    """Run on ranks; a loss that the checker refused to type is summed or equal, whichever is nearer."""
    case = CASES[name]
    axes = dict.fromkeys(case.program.mesh)
    kinds = [{a: P for a in axes}, {a: I for a in axes}]
    if not case.refused:
        kinds = [check(case.program)[0]]
    off = min(parity(case.program, case.program.body, each) for each in kinds)
    assert (off < 1e-9) == case.right, off

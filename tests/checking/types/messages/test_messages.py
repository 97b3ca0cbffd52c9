"""Messages of the checker for bugs that people make, and that its first repair is right.

The messages are in `expected/`, one file per program; NXD_UPDATE_MESSAGES=1 writes them anew.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, SpmdTypeMode, assert_type
from tests.checking.types.messages import programs  # fills PROGRAMS
from tests.checking.types.messages.running import PROGRAMS, apply, check, message, parity
from tests.support.paths import file_name

EXPECTED = Path(__file__).parent / "expected"
TOLERANCE = 1e-9
# Before 3.11 an instruction does not say where in its line it is: messages then have fewer names.
POSITIONS = pytest.mark.skipif(sys.version_info < (3, 11), reason="needs the positions of instructions")
UPDATE = os.environ.get("NXD_UPDATE_MESSAGES") == "1"
RUN = [name for name, program in PROGRAMS.items() if program.numeric and program.rounds == 1]


def found(name):
    with pytest.raises(SpmdTypeError) as caught:
        check(PROGRAMS[name])
    return caught.value


def test_there_are_messages_for_many_bugs():
    assert len(PROGRAMS) >= 30
    assert {path.stem for path in EXPECTED.glob("*.txt")} == set(PROGRAMS)


@POSITIONS
@pytest.mark.parametrize("name", PROGRAMS)
def test_message(name):
    text = message(PROGRAMS[name], found(name))
    path = EXPECTED / f"{name}.txt"
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", PROGRAMS)
def test_message_has_all_parts(name):
    error = found(name)
    assert error.what and error.why and error.repairs and error.rule
    assert f"{file_name(programs)}:" in str(error)


@POSITIONS
def test_a_reduction_comes_first():
    """The first repair adds a sum that was forgotten or comes too late; nothing hides that it is missing."""
    seen = 0
    for name in PROGRAMS:
        error = found(name)
        pending = [types for types in error.details.get("types", ()) if types.get(error.axis) is P]
        if pending or "unreduced sum" in str(error) or "the sum is partial" in str(error):
            seen += 1
            assert "reduce" in error.repairs[0], (name, error.repairs)
            assert not any("src=spmd.I, dst=spmd.R" in repair for repair in error.repairs), (name, error.repairs)
    assert seen >= 12


JOINED = {
    "add": lambda x, y, m: x + y,
    "sub": lambda x, y, m: y - x,
    "mul": lambda x, y, m: x * y,
    "cat": lambda x, y, m: torch.cat([x, y]),
    "where": lambda x, y, m: torch.where(m, x, y),
    "maximum": lambda x, y, m: torch.maximum(x, y),
    "lerp": lambda x, y, m: torch.lerp(x, y, 0.5),
    "matmul": lambda x, y, m: x.t() @ y,
    "linear": lambda x, y, m: F.linear(y, x),
    "norm": lambda x, y, m: F.rms_norm(y, (8,), x[0]),
    "mse": lambda x, y, m: F.mse_loss(x, y, reduction="sum"),
}


@pytest.mark.each_value
@pytest.mark.parametrize("level", ["G", "L"])
@pytest.mark.parametrize("name", JOINED)
def test_convert_is_never_offered_against_a_sum_that_is_not_reduced(name, level):
    mesh = Mesh(2, tp=2)
    with comm.as_rank(mesh, 0), SpmdTypeMode(mesh, level=level):
        x = assert_type(torch.randn(4, 8).requires_grad_(), {"tp": I})
        h = assert_type(torch.randn(4, 8).requires_grad_(), {"tp": S(1)})
        w = assert_type(torch.randn(8, 8).requires_grad_(), {"tp": S(1)})
        mask = assert_type(torch.ones(4, 8, dtype=torch.bool), {"tp": R})
        y = F.linear(h, w).view(2, 2, 8).flatten(0, 1)
        with pytest.raises(SpmdTypeError) as caught:
            JOINED[name](x, y, mask)
    repairs = caught.value.repairs
    assert repairs[0].startswith('spmd.all_reduce(y, "tp", dst=spmd.'), repairs
    assert not any("convert" in repair for repair in repairs), repairs


@POSITIONS
@pytest.mark.parametrize("name", RUN)
def test_first_repair_is_right(name):
    """With the first repair the program checks clean and equals the one on one rank; without it does not."""
    program = PROGRAMS[name]
    repair = found(name).repairs[0]
    body, inputs = program.body, program.inputs
    if program.repaired is None:
        assert repair.edits, f"{repair!r} is no change of the source"
        body = apply(program, repair.edits)
    elif isinstance(program.repaired, dict):
        inputs = {**inputs, **program.repaired}
    else:
        body = program.repaired
    loss_type = check(program, body, inputs)
    assert parity(program, body, loss_type, inputs) <= TOLERANCE
    before = parity(program, program.body, loss_type, inputs if program.same else None)
    assert (before <= TOLERANCE) if program.same else (before > 1e-4), before

"""Every pair of types that an operator does not take: the message says what is wrong, and what it advises works."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.spmd import I, P, R, S, SpmdTypeError, V
from neuronx_dist.spmd.rows import ROWS
from neuronx_dist.spmd.types import Shard

OPERATORS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert", "reinterpret")
TYPES = (R, I, V, P, S(0), S(1))
SIZE = 2
WHOLE = torch.arange(16, dtype=torch.float64).reshape(4, 4)
STACKED = torch.arange(8, dtype=torch.float64).reshape(2, 4)  # what V stacks: [size, 4]


def takes(operator, src, dst):
    """Returns whether the operator has a row for the pair, or nothing to do."""
    if operator in ("convert", "reinterpret"):
        data_is_the_same = {src.letter, dst.letter} == {"V", "S"} and operator == "convert"
        if src == dst or data_is_the_same:
            return True
    return (operator, src.letter, dst.letter) in ROWS


ILLEGAL = [
    (operator, src, dst)
    for operator, src, dst in itertools.product(OPERATORS, TYPES, TYPES)
    if not takes(operator, src, dst)
]


def local(kind, whole):
    rank = comm.rank("tp")
    if isinstance(kind, Shard):
        return whole.chunk(SIZE, kind.dim)[rank].clone()
    if kind is V:
        return whole[rank].clone()
    return whole / 2 + (1 if rank else -1) if kind is P else whole.clone()


def together(kind, pieces):
    if isinstance(kind, Shard):
        return torch.cat(pieces, kind.dim)
    if kind is V:
        return torch.stack(pieces)
    if kind is P:
        return sum(pieces)
    assert all(torch.equal(piece, pieces[0]) for piece in pieces)
    return pieces[0]


def message(operator, src, dst):
    with comm.as_rank(Mesh(SIZE, tp=SIZE), 0), pytest.raises(SpmdTypeError) as caught:
        getattr(spmd, operator)(local(src, STACKED), "tp", src=src, dst=dst)
    return str(caught.value)


def test_there_are_many():
    assert len(ILLEGAL) > 100


@pytest.mark.parametrize(("operator", "src", "dst"), ILLEGAL, ids=str)
def test_the_advice_works(operator, src, dst):
    text = message(operator, src, dst)
    assert text.startswith(f"{operator}({src}, {dst}) does not exist: ")
    advised = re.findall(r"(?:use|or) (\w+\(x, axis(?:[^()]|\(\d\))*\))", text)
    if src == dst:
        assert "leave the call out" in text and not advised, text
        return
    assert advised, text
    names = {**vars(spmd), "axis": "tp"}
    for code in advised:
        assert not code.startswith(f"{operator}(") or "src=V" in code, text  # no operator advises itself

        def step(code=code):
            return eval(code, {**names, "x": local(src, STACKED if V in (src, dst) else WHOLE)})

        pieces = threads.run(Mesh(SIZE, tp=SIZE), step)
        keeps_the_value = not code.startswith("reinterpret") and {src.letter, dst.letter} != {"V", "S"}
        if keeps_the_value and not code.startswith("all_reduce(x, axis, src=V"):
            whole = STACKED if V in (src, dst) else WHOLE
            assert torch.equal(together(dst, pieces), whole), (code, text)


@pytest.mark.parametrize("operator", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("src", [R, I], ids=str)
def test_nothing_is_converted_to_itself(operator, src):
    """`all_gather(R, R)` was answered with `convert(x, axis, src=R, dst=R)`, which does nothing."""
    text = message(operator, src, src)
    assert "convert" not in text and f"it is {src} already, so leave the call out" in text, text


def test_the_message_says_what_the_ranks_hold():
    x = torch.ones(2, 2)
    cases = {
        ("all_reduce", S(0), R): "the ranks hold pieces, and a sum adds them up",
        ("all_gather", P, R): "pieces of summands are not pieces of the sum",
    }
    with comm.as_rank(Mesh(2, tp=2), 0):
        for (operation, src, dst), text in cases.items():
            with pytest.raises((SpmdTypeError, TypeError, ValueError)) as error:
                getattr(spmd, operation)(x, "tp", src=src, dst=dst)
            assert [one for one in cases.values() if one in str(error.value)] == [text]

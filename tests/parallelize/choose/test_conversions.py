"""Conversions, and the bytes that they send: counted from the collectives that they start."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallelize.choose.conversions import conversion
from neuronx_dist.program.program import Value
from neuronx_dist.spmd import I, P, R, S

TYPES = [R, I, P, P("avg"), S(0), S(1), S(1, stride=2)]
SENT = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def value(requires_grad: bool = True) -> Value:
    return Value("x", "input", (4, 8), torch.float64, requires_grad)


def test_legal_pairs():
    """Every pair of types: none to P from S, from R to I, or of blocks; the rest by the operator of the table."""
    legal = {
        (src, dst): way.operator
        for src, dst in product(TYPES, TYPES)
        if src != dst and (way := conversion(value(), src, dst, 2))
    }
    expected = {(p, dst): "all_reduce" for p in (P, P("avg")) for dst in (R, I)}
    expected |= {(p, S(dim)): "reduce_scatter" for p in (P, P("avg")) for dim in (0, 1)}
    expected |= {(S(dim), dst): "all_gather" for dim in (0, 1) for dst in (R, I)}
    expected |= {(S(0), S(1)): "all_to_all", (S(1), S(0)): "all_to_all"}
    expected |= {(src, dst): "convert" for src in (R, I) for dst in (P, S(0), S(1))}
    assert legal == expected | {(I, R): "convert"}


def test_what_does_not_divide():
    assert conversion(value(), R, S(0), 3) is None
    assert conversion(value(), S(1), S(0), 8) is None
    assert conversion(value(), S(1), R, 8) is not None
    with pytest.raises(ValueError, match="is R already"):
        conversion(value(), R, R, 2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("graded", [True, False])
def test_bytes_are_those_of_the_collectives(size, graded):
    """Forward and backward of each operator are run on threads, and what they start is added up."""
    pairs = [(a, b) for a, b in product(TYPES, TYPES) if a != b and conversion(value(), a, b, size)]

    def run():
        found = []
        for src, dst in pairs:
            way = conversion(value(graded), src, dst, size)
            shape = [4, 8]
            if src.letter == "S":
                shape[src.dim] //= size
            x = torch.rand(shape, dtype=torch.float64, requires_grad=graded)
            options = {"expert_mode": True} if way.operator == "convert" else {}
            with comm.record() as forward:
                y = getattr(spmd, way.operator)(x, "tp", src=src, dst=dst, **options)
            with comm.record() as backward:
                if graded:
                    y.backward(torch.rand_like(y))
            found.append((src, dst, way, forward, backward))
        return found

    for src, dst, way, forward, backward in threads.run(Mesh(size, tp=size), run)[0]:
        assert way.collectives == (len(forward), len(backward)), (src, dst)
        for events, sent in ((forward, way.forward), (backward, way.backward)):
            whole = 4 * 8 * 8
            total = sum(
                whole * (size - 1) // size // size
                if event.verb == "all_to_all"
                else SENT[event.verb] * (whole * (size - 1) // size)
                for event in events
            )
            assert sent == total, (src, dst, way, events)

"""Typed operators and verbs as XLA collectives, executed on virtual devices: values, gradients, lowered programs."""

from __future__ import annotations

import pytest
import torch

from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import replay
from tests.xla.compare import assert_close, draw, on_threads, same_as_threads
from tests.xla.programs.operators import CONFORMANCE, after_a_nan, every_operator, every_verb

TP2 = Mesh(4, tp=2)  # two tensor-parallel groups: {0,1} and {2,3}


def column(index: int, rank: int) -> list[torch.Tensor]:
    """One side of the table for a rank: 5 is x, 6 y, 7 g, 8 gx."""
    return [torch.tensor(row[index][rank % 2], dtype=torch.float32) for row in CONFORMANCE]


def test_every_operator_forward_and_backward():
    arguments = [(column(5, rank), column(7, rank)) for rank in range(4)]
    replayed = replay(every_operator, TP2, arguments)
    for rank, found in enumerate(replayed.outputs):
        expected = [dict(y=y, gx=gx) for y, gx in zip(column(6, rank), column(8, rank)) for _ in range(2)]
        assert_close(found, expected, tolerance=0)
        assert len(found) == 2 * len(CONFORMANCE)
    assert {c.groups for c in replayed.program.collectives} == {((0, 1), (2, 3))}


@pytest.mark.parametrize("tp", [2, 4])
def test_every_verb_as_on_threads(tp):
    mesh = Mesh(4, tp=tp)
    arguments = [
        (
            draw(4, 8, seed=r),
            draw(1, seed=r)[0],
            draw(4, 8, seed=r).bfloat16(),
            torch.tensor([r, 2**40 + r]),
            torch.tensor([r % 2 == 0, True]),
        )
        for r in range(4)
    ]
    replayed = same_as_threads(every_verb, mesh, arguments)
    for found, expected in zip(replayed.outputs, on_threads(every_verb, mesh, arguments)):
        for name in ("half in fp32", "half scattered in fp32", "broadcast", "max", "int"):  # exact in any order
            assert torch.equal(found[name], expected[name]), name


def test_a_nan_stays_in_its_own_collective():
    """torch_xla's token, which orders collectives, would carry it into all that follow."""
    poison = torch.full((4, 2), torch.nan)
    poison[0] = torch.inf
    arguments = [(draw(4, 2, seed=rank), poison) for rank in range(2)]
    mesh = Mesh(2, tp=2)
    for found, expected in zip(replay(after_a_nan, mesh, arguments).outputs, on_threads(after_a_nan, mesh, arguments)):
        assert not any(torch.isfinite(bad).any() for bad in found[:2])
        assert_close(found[2:], expected[2:])

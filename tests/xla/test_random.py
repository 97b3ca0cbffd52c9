"""Random streams: which masks agree over ranks, with one program for all of them."""

from __future__ import annotations

import torch

from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import replay
from tests.xla.one_device import on_device
from tests.xla.programs import random_numbers as programs

TP2 = Mesh(4, tp=2)
ONES = torch.ones(64, 64)


def test_streams_agree_and_differ_over_ranks():
    ranks = replay(programs.masks, TP2, [(7, ONES)] * 4).outputs
    first = ranks[0]
    for masks in ranks:
        for name, mask in masks.items():
            assert set(mask.unique().tolist()) == {0.0, 2.0}
            assert 0.45 < float(mask.mean()) / 2 < 0.55, name
        assert torch.equal(masks["default"], first["default"])
        assert torch.equal(masks["default again"], first["default again"])
        assert torch.equal(masks["first"], masks["first, repeated"])
        assert not torch.equal(masks["first"], masks["second"])
        assert not torch.equal(masks["default"], masks["default again"])
    assert not torch.equal(ranks[0]["first"], ranks[1]["first"])  # tp ranks 0 and 1
    assert torch.equal(ranks[0]["first"], ranks[2]["first"])  # tp rank 0 of both data-parallel ranks


def test_another_seed_is_the_same_program():
    """The seed is an input: a sweep over seeds compiles once."""
    a, b = (replay(programs.masks, Mesh(2, tp=2), [(seed, ONES)] * 2) for seed in (7, 8))
    assert a.program.lines == b.program.lines
    assert not torch.equal(a.outputs[0]["default"], b.outputs[0]["default"])


def test_checkpointing_draws_the_same_numbers_again():
    for found in replay(programs.recomputed, TP2, [(torch.randn(16, 16),)] * 4).outputs:
        assert torch.equal(found["plain"], found["checkpointed"])
        assert torch.equal(found["plain, next"], found["checkpointed, next"])
        assert float(found["plain"].abs().sum()) > 0


def test_states_come_back_on_a_device():
    """Over steps too: after one, torch_xla's state has 64 bits, more than a number in a tensor."""
    found = on_device(programs.states)
    assert len(found) == 6 and all(found.values()), found

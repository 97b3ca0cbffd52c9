"""ShardTensors as one XLA program for all ranks: the values and gradients of ranks as threads, the collectives."""

from __future__ import annotations

import pytest

from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import replay
from tests.xla.compare import draw, same_as_threads
from tests.xla.programs import shard_tensors as programs


def leaf(*shape: int, seed: int = 0):
    return draw(*shape, seed=seed).requires_grad_()


def test_pointwise_and_linear():
    arguments = [(leaf(2, 8, seed=rank), leaf(6, 8, seed=10), leaf(6, seed=11)) for rank in range(2)]
    replayed = same_as_threads(programs.pointwise_and_linear, Mesh(2, tp=2), arguments, tolerance=1e-5)
    assert {kind for kind, _ in replayed.program.counts()} == {"all-reduce"}


def test_redistributed():
    same_as_threads(programs.redistributed, Mesh(2, tp=2), [(leaf(2, 8, seed=rank),) for rank in range(2)])


@pytest.mark.parametrize("ranks", [2, 4])
def test_convolutions_exchange_halos_by_one_program(ranks: int):
    arguments = [
        (leaf(1, 2, 4, 5, seed=rank), leaf(3, 2, 3, 3, seed=10), leaf(2, 3, 3, 3, seed=11)) for rank in range(ranks)
    ]
    replayed = same_as_threads(programs.convolutions, Mesh(ranks, tp=ranks), arguments, tolerance=1e-5)
    assert {kind for kind, _ in replayed.program.counts()} == {"all-reduce", "collective-permute"}


def test_pools_exchange_halos_by_one_program():
    arguments = [(leaf(1, 2, 4, 5, seed=rank),) for rank in range(2)]
    replayed = same_as_threads(programs.pools, Mesh(2, tp=2), arguments, tolerance=1e-5)
    assert {kind for kind, _ in replayed.program.counts()} == {"collective-permute"}


def test_roll_and_flip():
    same_as_threads(programs.rolled, Mesh(2, tp=2), [(leaf(2, 3, seed=rank),) for rank in range(2)])


def test_results_that_differ_in_size_are_refused():
    with pytest.raises(Exception, match=r"results have sizes \[5, 4\], but on XLA all ranks run one program"):
        replay(programs.uneven, Mesh(2, tp=2), [(draw(1, 1, 4),) for _ in range(2)])

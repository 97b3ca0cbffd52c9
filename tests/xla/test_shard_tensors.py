"""ShardTensors as one XLA program for all ranks: the values and gradients of ranks as threads, the collectives."""

from __future__ import annotations

from neuronx_dist.mesh import Mesh
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

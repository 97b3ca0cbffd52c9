"""Rank orders of devices on XLA: replica groups are those of the mesh, and so are the values."""

from __future__ import annotations

import pytest

from neuronx_dist.mesh import Mesh
from tests.xla.compare import draw, same_as_threads
from tests.xla.programs import layers as programs

GROUPS = {
    "trn1": {"tp": ((0, 2, 4, 6), (1, 3, 5, 7)), "dp,cp": ((0, 1), (2, 3), (4, 5), (6, 7))},
    "trn2": {"tp": ((0, 1, 6, 7), (2, 3, 4, 5)), "dp,cp": ((0, 2), (1, 3), (6, 4), (7, 5))},
}


@pytest.mark.parametrize("topology", GROUPS)
def test_column_and_row(topology):
    mesh = Mesh(8, tp=4, topology=topology, ranks_per_node=8)
    arguments = [({}, draw(8, 4, 16, seed=mesh.coordinate("dp", rank)).requires_grad_()) for rank in range(8)]
    replayed = same_as_threads(programs.pair, mesh, arguments)
    assert {collective.axis: collective.groups for collective in replayed.program.collectives} == GROUPS[topology]

"""A replayed training loop beside the same under gloo, and in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from neuronx_dist.mesh import Mesh
from neuronx_dist.xla_replay import ReplayedLoop, replay_loop
from tests.support.llama_training import distance, reference
from tests.support.pool import processes
from tests.xla.programs import training as programs
from tests.xla.programs.training import Training

STEPS = 3
TOLERANCE = 1e-5  # ‖Δ‖ / ‖w‖, of every tensor


@cache
def replayed(
    mesh: Mesh, case: Training, steps: int = STEPS, setup: Callable[..., Any] = programs.setup
) -> ReplayedLoop:
    """Kept for the next test that asks for the same."""
    arguments = [(case, torch.zeros(1), torch.tensor(1e-3))] * mesh.world_size
    batches = [
        [programs.rows_of(mesh.dp, mesh.coordinate("dp", rank), step) for step in range(steps)]
        for rank in range(mesh.world_size)
    ]
    return replay_loop(setup, mesh, arguments, batches)


def assert_trains_as_elsewhere(case: Training, **sizes: int) -> list[dict[str, torch.Tensor]]:
    """Losses, norms, and every tensor of the state after the last step. Returns each rank's weights."""
    mesh = Mesh(4, **sizes)
    found = replayed(mesh, case)
    under_gloo = processes(4).run(programs.under_gloo, case, STEPS, mesh=sizes)
    alone = reference(case.options, case.optimizer, STEPS)
    of_ranks = []
    for rank, (outputs, state) in enumerate(under_gloo):
        for step in range(STEPS):
            for key, plain in (("loss", alone.losses), ("norm", alone.norms)):
                value = float(found.outputs[rank][step][key])
                assert distance(value, float(outputs[step][key])) <= TOLERANCE, (key, rank, step)
                assert distance(value, plain[step]) <= TOLERANCE, (key, rank, step)
        weights = {key: value for key, value in found.states[rank].items() if key.startswith("['model']")}
        # Those of other stages are on meta under gloo.
        assert weights.keys() == {k for k, x in state.items() if k.startswith("['model']") and not x.is_meta}
        for key, value in weights.items():
            assert distance(value, state[key]) <= TOLERANCE, (rank, key, distance(value, state[key]))
        for key in state.keys() & found.states[rank].keys() - weights.keys():  # masters, moments
            assert distance(found.states[rank][key], state[key]) <= 10 * TOLERANCE, (rank, key)
        of_ranks.append(weights)
    return of_ranks

"""The state of random generators: whole in the same layout, and of the nearest rank in another."""

from __future__ import annotations

import random
import sys

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.checkpoint import random_state
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.random import set_random_seed
from neuronx_dist.spmd.random import streams


def draw() -> list[float]:
    numbers = [float(torch.rand(())), random.random()]
    if "numpy" in sys.modules:
        numbers.append(float(sys.modules["numpy"].random.random()))
    with streams().fork():
        numbers.append(float(torch.rand(())))
    return numbers


def test_in_the_same_layout_every_stream_goes_on() -> None:
    pytest.importorskip("numpy")
    with comm.as_rank(Mesh(2, tp=2), 1):
        set_random_seed(3)
        draw()
        state = random_state.capture()
        numbers = draw()
        set_random_seed(4)
        random_state.restore(state)
        assert draw() == numbers and len(numbers) == 4


def test_in_another_layout_streams_that_differ_by_rank_stay() -> None:
    with comm.as_rank(Mesh(2, tp=2), 1):
        set_random_seed(3)
        state = random_state.capture()
        *default, _ = draw()
    with comm.as_rank(Mesh(4, tp=4), 1):
        set_random_seed(4)
        *_, drawn = draw()
        set_random_seed(4)
        random_state.restore(state)
        assert draw() == [*default, drawn]


@pytest.mark.parametrize(
    "mesh, rank, file",
    [
        (Mesh(4, tp=2), 3, "random/dp_rank_01_cp_rank_00_tp_rank_01_pp_rank_00.pt"),
        (Mesh(8, tp=4), 7, "random/dp_rank_01_cp_rank_00_tp_rank_01_pp_rank_00.pt"),
        (Mesh(8, tp=2), 5, "random/dp_rank_00_cp_rank_00_tp_rank_01_pp_rank_00.pt"),
        (Mesh(2, pp=2), 1, "random/dp_rank_00_cp_rank_00_tp_rank_00_pp_rank_00.pt"),
    ],
)
def test_the_nearest_rank(mesh: Mesh, rank: int, file: str) -> None:
    saved = []
    for number in range(4):
        with comm.as_rank(Mesh(4, tp=2), number):
            saved.append(random_state.file_of())
    with comm.as_rank(mesh, rank):
        assert random_state.file_of([*saved, ".metadata"]) == file


def test_the_generator_of_another_device_stays() -> None:
    """Saved on a GPU, or on an XLA device, and loaded on the CPU."""
    with comm.as_rank(Mesh(1), 0):
        set_random_seed(3)
        state = random_state.capture()
        numbers = draw()
        state["default"] = [*state["default"], torch.zeros(16, dtype=torch.uint8)]
        state["streams"] = {name: [*values, torch.zeros(1)] for name, values in state["streams"].items()}
        set_random_seed(4)
        *_, drawn = draw()
        set_random_seed(4)
        random_state.restore(state)
        assert draw() == [*numbers[:-1], drawn]

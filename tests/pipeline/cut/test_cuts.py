"""Positions of cuts."""

from __future__ import annotations

import pytest

from neuronx_dist.pipeline import create_partitions
from neuronx_dist.pipeline.cut.cuts import check_cuts


@pytest.mark.parametrize(
    "stages,layers,expected",
    [(4, 19, [3, 8, 13]), (1, 5, []), (2, 4, [1]), (2, 5, [1]), (3, 8, [1, 4]), (4, 4, [0, 1, 2]), (3, 5, [0, 2])],
)
def test_the_remainder_goes_to_the_last_stages(stages: int, layers: int, expected: list[int]) -> None:
    names = [f"layers.{i}" for i in range(layers)]
    assert create_partitions(stages, names) == [f"layers.{i}" for i in expected]


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="4 pipeline stages need at least 4 transformer layers, found 3"):
        create_partitions(4, ["a", "b", "c"])
    with pytest.raises(ValueError, match="pipeline_parallel_size must be at least 1, got 0"):
        create_partitions(0, ["a", "b", "c"])


@pytest.mark.parametrize(
    "cuts,message",
    [
        (["layers.1"], "3 pipeline stages need 2 cuts, got 1"),
        (
            ["layers.1", "layer.2"],
            r"'layer.2' is not a layer of this model; near it: layers\..*\. A cut is a transformer layer",
        ),
        (["layers.2", "layers.1"], "in the order in which they run"),
        (["layers.1", "layers.1"], "must be different"),
    ],
)
def test_wrong_cuts(cuts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_cuts(cuts, ["embed", *(f"layers.{i}" for i in range(4))], 3)

"""Where the cuts go, what each stage holds, and what travels between stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import create_partitions
from neuronx_dist.pipeline.cut.partition import check_cuts, place_by_recording, place_by_registration, split
from neuronx_dist.pipeline.record.recorder import record
from tests.pipeline.test_parity import Skip, WeightOutside
from tests.support.pipeline_models import SEQ, Block, Model, batch, make


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


def plans_of(model: torch.nn.Module, cuts: list[str], inputs: dict[str, Any] | None = None) -> Any:
    with comm.as_rank(Mesh(1), 0):
        return split(record(model, inputs or batch(), [Block]), cuts)


def test_calls_between_two_cuts_are_a_stage() -> None:
    plans = plans_of(make(), ["layers.0", "layers.2"])
    assert [[str(node.target) for node in plan.nodes if node.op == "call_module"] for plan in plans] == [
        ["embed", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "norm", "head"],
    ]
    assert [[node.name for node in plan.sent] for plan in plans] == [["layers_0"], ["layers_2"], []]
    assert [[node.name for node in plan.received] for plan in plans] == [[], ["layers_0"], ["layers_2"]]


def test_values_pass_through_the_stages_between() -> None:
    plans = plans_of(make(Skip), ["layers.0", "layers.1", "layers.2"])
    assert [sorted(node.name for node in plan.sent) for plan in plans] == [
        ["embed", "layers_0"],
        ["embed", "layers_0", "layers_1"],
        ["embed", "layers_0", "layers_1", "layers_2"],
        [],
    ]


def test_what_depends_on_inputs_alone_is_computed_where_it_is_needed() -> None:
    class Masked(Model):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            mask = (ids != 3).double()[:, None, :] * torch.ones(SEQ, SEQ, dtype=torch.float64).tril_()
            x = self.layers[1](self.layers[0](self.embed(ids)), mask)
            return self.loss(self.layers[3](self.layers[2](x), mask), labels)

    plans = plans_of(make(Masked), ["layers.0", "layers.1", "layers.2"])
    assert [sum("mul" in node.name for node in plan.nodes) for plan in plans] == [0, 1, 0, 1]
    assert all(len(plan.sent) == 1 for plan in plans[:3])
    assert [sum(node.name == "tril_" for node in plan.nodes) for plan in plans] == [0, 1, 0, 1]


def test_boundaries_are_known_without_running() -> None:
    plans = plans_of(make(), ["layers.1"])
    spec = plans[0].sent[0].meta["info"].spec
    assert spec == ((8, SEQ, 8), (SEQ * 8, 8, 1), torch.float64, True)


def test_placement_by_registration_and_by_recording() -> None:
    model, cuts = make(), ["layers.1"]
    by_registration = place_by_registration(model, cuts, [Block])
    assert by_registration == place_by_recording(model, plans_of(model, cuts), [Block])
    assert by_registration.stages("layers.1.up.weight") == {0}
    assert by_registration.stages("layers.2.up") == {1}
    assert by_registration.stages("head.weight") == {1}
    assert by_registration.stages("") is None and by_registration.stages("layers") is None

    model = make(WeightOutside)
    placed = place_by_recording(model, plans_of(model, cuts), [Block])
    assert placed.stages("embed.weight") == {0, 1}
    assert placed.stages("position") == {0}

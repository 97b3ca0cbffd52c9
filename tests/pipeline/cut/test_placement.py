"""Parameters and buffers of each stage."""

from __future__ import annotations

from neuronx_dist.pipeline.cut.placement import place_by_recording, place_by_registration
from tests.pipeline.cut.test_splitting import plans_of
from tests.pipeline.test_parity import WeightOutside
from tests.support.pipeline_models import Block, make


def test_placement_by_registration_and_by_recording() -> None:
    model, cuts = make(), ["layers.1"]
    by_registration = place_by_registration(model, cuts, [Block])
    assert by_registration == place_by_recording(model, plans_of(model, cuts), cuts, [Block])
    assert by_registration.stages("layers.1.up.weight") == {0}
    assert by_registration.stages("layers.2.up") == {1}
    assert by_registration.stages("head.weight") == {1}
    assert by_registration.stages("") is None and by_registration.stages("layers") is None

    model = make(WeightOutside)
    placed = place_by_recording(model, plans_of(model, cuts), cuts, [Block])
    assert placed.stages("embed.weight") == {0, 1}
    assert placed.stages("position") == {0}

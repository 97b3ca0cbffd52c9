"""The sizes of a transformer, and the two rules by which a layout divides them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from neuronx_dist.checking.types.axis_powers import AxisSize
from neuronx_dist.model_shape import Heads, ModelShape, padded_heads, stage_layers

CONFIG: dict[str, Any] = dict(
    num_hidden_layers=3,
    hidden_size=24,
    num_attention_heads=6,
    num_key_value_heads=2,
    intermediate_size=48,
    vocab_size=100,
    max_position_embeddings=64,
)
SHAPE = ModelShape(layers=3, hidden=24, heads=6, kv_heads=2, intermediate=48, vocab=100, max_positions=64)


def test_a_config_is_read_by_its_attributes() -> None:
    config = SimpleNamespace(**CONFIG)
    assert ModelShape.of(config) == SHAPE and ModelShape.of(SHAPE) is SHAPE
    outer = SimpleNamespace(num_hidden_layers=9, get_text_config=lambda: config)  # of a model of images and text
    assert ModelShape.of(outer) == SHAPE
    assert ModelShape.of(SimpleNamespace()) == ModelShape() == ModelShape(*[None] * 7)


@pytest.mark.parametrize("name", CONFIG)
def test_what_a_config_does_not_say_is_none(name: str) -> None:
    place = list(CONFIG).index(name)
    field = list(vars(SHAPE))[place]
    for missing in ({}, {name: None}, {name: [3, 4]}):
        config = SimpleNamespace(**{key: value for key, value in CONFIG.items() if key != name}, **missing)
        expected = {**vars(SHAPE), field: None}
        if name == "num_key_value_heads":
            expected["kv_heads"] = 6  # as many as there are query heads
        assert vars(ModelShape.of(config)) == expected


def test_padded_heads_by_hand() -> None:
    for heads, kv_heads, tp, expected in (
        (8, 8, 1, (8, 8, 1)), (8, 2, 2, (8, 2, 1)), (8, 2, 4, (8, 2, 2)), (8, 2, 8, (8, 2, 4)),
        (9, 3, 2, (12, 4, 1)), (9, 3, 6, (12, 3, 2)), (9, 3, 3, (9, 3, 1)), (6, 2, 4, (8, 2, 2)),
        (4, 1, 4, (4, 1, 4)), (3, 1, 4, (4, 1, 4)), (48, 8, 32, (64, 8, 4)), (15, 5, 4, (24, 8, 1)),
        (15, 5, 16, (32, 8, 2)),
    ):  # fmt: skip
        assert padded_heads(heads, kv_heads, tp) == expected, (heads, kv_heads, tp)


def test_padded_heads_are_the_fewest_that_can_be_spread() -> None:
    for kv_heads in range(1, 9):
        for group in range(1, 6):
            for tp in range(1, 17):
                heads = padded_heads(kv_heads * group, kv_heads, tp)
                counts = [n for n in range(kv_heads, kv_heads + tp + 1) if n % tp == 0 or tp % n == 0]
                assert heads.kv_heads == min(counts) and heads.replicas == max(1, tp // heads.kv_heads)
                padded_group = heads.heads // heads.kv_heads
                assert heads.heads == padded_group * heads.kv_heads and padded_group % heads.replicas == 0
                assert group <= padded_group < group + heads.replicas
                assert heads.pads(kv_heads * group, kv_heads) == (
                    heads.heads > kv_heads * group or heads.kv_heads > kv_heads
                )
    assert Heads(4, 2, 1).pads(4, 1) and Heads(4, 2, 1).pads(3, 2) and not Heads(4, 2, 1).pads(4, 2)


@pytest.mark.parametrize(
    "layers, pp, sizes",
    [(4, 1, [4]), (4, 2, [2, 2]), (5, 2, [2, 3]), (7, 3, [2, 2, 3]), (8, 3, [2, 3, 3]), (3, 4, [0, 1, 1, 1])],
)
def test_the_last_stages_have_a_layer_more(layers: int, pp: int, sizes: list[int]) -> None:
    stages = stage_layers(layers, pp)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_a_config_without_heads_has_none_to_pad() -> None:
    assert padded_heads(0, 0, 2) == (0, 0, 1)


def test_the_padded_heads_of_a_type_check_and_of_a_run_are_cached_apart() -> None:
    """Sizes that know their axes are equal to plain ones; a checkpoint refuses them, a type check needs them."""
    known = AxisSize(4, {"tp": 1})
    for tp in (known, 4, known):
        assert type(padded_heads(7, 1, tp).replicas) is type(tp)

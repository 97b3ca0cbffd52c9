"""The names that a message offers in place of a wrong one."""

from __future__ import annotations

import pytest

from neuronx_dist.nearest import nearest

LAYERS = ["Attention", "MLP", "DecoderLayer", "RMSNorm"]


@pytest.mark.parametrize(
    "name, candidates, expected",
    [
        ("attention", LAYERS, "Attention"),  # whatever the case
        ("DECODERLAYER", LAYERS, "DecoderLayer"),
        ("DecodrLayr", [*LAYERS, "DecoderLayer"], "DecoderLayer"),  # each once
        ("layers.1", [f"layers.{i}" for i in range(9)], "layers.1, layers.8, layers.7, layers.6"),  # four at most
        ("abcxyzuvwo", ["abcdefghij"], "abcdefghij"),  # three letters of ten
        ("abxyzuvwop", ["abcdefghij", "q", "Q"], "abcdefghij, q, Q"),  # two are too few: some of all
        ("zzz", ["a", "b", "c", "d", "e"], "a, b, c, d"),
        ("zzz", [], ""),
    ],
)
def test_nearest(name: str, candidates: list[str], expected: str) -> None:
    assert nearest(name, iter(candidates)) == expected

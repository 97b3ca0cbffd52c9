"""Modules by layouts beside one process: results, losses, gradients, norms, weights after steps of SGD and AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from neuronx_dist.parallel_layers.parallel_state import destroy_model_parallel
from tests.parallelize.support.hf_models import HF_MODELS
from tests.parallelize.support.matrix import (
    LAYOUTS,
    NAMES,
    OPTIMIZERS,
    Run,
    assert_same,
    case,
    compiled,
    has_tied_weights,
    in_one_process,
    on_rank,
    on_threads,
)
from tests.parallelize.support.models import MODELS
from tests.support.pool import processes

pytestmark = pytest.mark.slow

TO_THE_BIT = {"dp1", "pp2", "pp4"}
"""Layouts that add up as one process does, but for tied weights, of which each stage adds up its own gradient."""


SAMPLED = {
    *(("vit", "dp1"), ("mixtral", "pp2 interleaved"), ("conv", "pp2 tp2"), ("pair", "zero4 in 2 groups")),  # were wrong
    *(("mlp", "pp2"), ("skip", "pp2"), ("skip", "pp2 interleaved"), ("gpt", "pp2 tp2"), ("gpt", "tp2 zero2")),
}


def in_sample(name: str, layout: str) -> bool:
    """Each layout once with a module of ours, some of transformers' models in one, all the others in the full tier."""
    number = list(LAYOUTS).index(layout)
    if (name, layout) in SAMPLED:
        return True
    if name in MODELS:
        return (number - list(MODELS).index(name)) % len(MODELS) == 0
    return number == 2 * list(HF_MODELS).index(name) and name in ("t5", "gemma2", "qwen3", "mamba", "bert")


def cases() -> list[Any]:
    parameters = []
    for name in NAMES:
        for layout in LAYOUTS:
            marks = [] if in_sample(name, layout) else [pytest.mark.full]
            marks += [pytest.mark.slow] if name in HF_MODELS else []
            parameters.append(pytest.param(name, layout, marks=marks))
    return parameters


def compare(ranks: list[list[Run]], name: str, layout: str, dtype: torch.dtype = torch.float64) -> None:
    tolerance = case(name, dtype).tolerance
    for index, optimizer in enumerate(OPTIMIZERS):
        wanted = in_one_process(name, optimizer, LAYOUTS[layout].units, LAYOUTS[layout].micro, dtype)
        is_exact = optimizer == "AdamW" and layout in TO_THE_BIT and not has_tied_weights(name)
        assert_same([runs[index] for runs in ranks], wanted, 0.0 if is_exact else tolerance)


@pytest.mark.parametrize("name, layout", cases())
def test_threads(name: str, layout: str, tmp_path: Path) -> None:
    compare(on_threads(name, layout, tmp_path), name, layout)


@pytest.mark.parametrize("layout", ["tp2 zero2", "pp2 tp2"])
@pytest.mark.parametrize(
    "name",
    ["gpt", *(pytest.param(name, marks=pytest.mark.full) for name in ("mlp", "pair", "rotary", "llama", "mixtral"))],
)
def test_float32(name: str, layout: str, tmp_path: Path) -> None:
    """Modules without a bias before batch norm, whose gradient is rounding alone."""
    compare(on_threads(name, layout, tmp_path, torch.float32), name, layout, torch.float32)


def _on_process(name: str, layout: str, folder: str) -> list[Run]:
    """Runs a layout in one process, where `parallelize` makes the mesh."""
    destroy_model_parallel()
    return on_rank(name, layout, folder)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "name, layout",
    [
        pytest.param(name, layout, marks=[] if (name, layout) == ("gpt", "pp2 zero2") else [pytest.mark.full])
        for name in ("gpt", "conv", "llama", "mixtral")
        for layout in ("tp4", "tp2 zero2", "async tp2 zero2", "pp2 zero2", "pp2 tp2")
    ],
)
def test_processes(name: str, layout: str, tmp_path: Path) -> None:
    compiled(name, LAYOUTS[layout], tmp_path)
    compare(processes(4).run(_on_process, name, layout, str(tmp_path)), name, layout)


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "async" in layout])
@pytest.mark.parametrize("name", ["mlp", pytest.param("conv", marks=pytest.mark.full)])
def test_reductions_in_backward_are_bit_equal_to_those_behind_it(name: str, layout: str, tmp_path: Path) -> None:
    asynchronous, synchronous = (
        on_threads(name, form, tmp_path / form) for form in (layout, layout.replace("async", "end2end"))
    )
    for runs, expected in zip(asynchronous, synchronous, strict=True):
        for run, other in zip(runs, expected, strict=True):
            torch.testing.assert_close(run, other, rtol=0, atol=0)

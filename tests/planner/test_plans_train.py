"""Recommended plans train at toy size: losses and weights are those of one process, for several models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import neuronx_dist as nxd
from neuronx_dist import comm
from tests.planner.training import ROWS, SEQ, one_process, trained

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = dict(vocab_size=96, max_position_embeddings=64, hidden_size=32, intermediate_size=48)
SIZES |= dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "tied": ("LlamaConfig", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(head_dim=8)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 2, {}),
    ("llama", 4, {"tp": 2, "pp": 2, "schedule": "1f1b"}),
    ("llama", 4, {"cp": 2, "recompute": "full"}),
    ("tied", 2, {"pp": 2, "schedule": "zb_v"}),
    ("qwen3", 4, {"tp": 2}),
    ("mixtral", 4, {"tp": 2, "ep": 2}),
]
FREE = [(model, world, {}) for model in MODELS for world in (2, 4)]  # the six fastest each


def parameters() -> list[Any]:
    cases = [pytest.param(*case, 1, id=f"{case[0]} {case[2]}") for case in CASES]
    return [*cases, *(pytest.param(*case, 6, id=f"{case[0]} {case[1]}", marks=pytest.mark.full) for case in FREE)]


@pytest.mark.parametrize("model, world, constraints, top", parameters())
def test_plans_train_as_one_process(model: str, world: int, constraints: dict[str, Any], top: int) -> None:
    """Mixtral's router rounds to float32, and so do its models here."""
    name, more = MODELS[model]
    config = getattr(transformers, name)(**SIZES, **more)
    config._experts_implementation = "eager"  # grouped products have no float64
    dtype, tolerance = ("float32", 1e-5) if model == "mixtral" else ("float64", 1e-10)
    job: dict[str, Any] = dict(global_batch=ROWS, seq_len=SEQ, cluster="h100", devices=world, top_k=top, check=False)
    losses, weights = one_process(config, dtype=dtype)
    for plan in nxd.plan(config, **job, constraints={**constraints, "dtype": dtype}):
        for found_losses, found in comm.threads.run(plan.layout.mesh(), trained, plan.candidate, config):
            assert found_losses == pytest.approx(losses, rel=tolerance), plan.words()
            assert weights.keys() - found.keys() == ({"lm_head.weight"} if config.tie_word_embeddings else set())
            for key, weight in found.items():
                assert torch.dist(weight, weights[key]) <= tolerance * weights[key].norm(), (plan.words(), key)

"""Causal LMs that `hf.swap` takes by a plan of columns and rows are ok on data- and tensor-parallel ranks.

That is as users call it, with labels, and with or without the number of labels in the whole batch.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from neuronx_dist import hf, spmd
from neuronx_dist.gradients import reduce
from neuronx_dist.hf.model_plan import UnsupportedModelError
from neuronx_dist.hf.plan_reading import read_plan
from tests.support.paths import file_name

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank_of_a_kind_is_confirmed")]

ARCHITECTURES = """arcee cohere cohere2 cwm ernie4_5 exaone4 gpt_neox granite helium hrm_text hyperclovax internlm3
    iquestcoder jais2 llama ministral ministral3 mistral nanochat nemotron olmo phi qwen2 qwen3 seed_oss smollm3
    stablelm starcoder2""".split()
SAMPLE = ("cohere", "llama", "nemotron", "olmo", "phi")  # blocks beside each other, gated, plain; norms without weights
FULL = os.environ.get("NXD_FULL") == "1"
MESH = {"dp": 2, "tp": 2}
SIZES: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, use_cache=False, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, attention_dropout=0.0, residual_dropout=0.0,
)  # fmt: skip


def model_of(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES))


def swapped(name: str) -> Any:
    return hf.swap(model_of(name)).train()


def inputs(items: bool) -> dict[str, torch.Tensor]:
    ids = torch.zeros(4, 8, dtype=torch.long)
    return {"input_ids": ids, "labels": ids, **({"num_items_in_batch": torch.ones(())} if items else {})}


@pytest.mark.each_value
@pytest.mark.parametrize("level", ["G", "L"])
@pytest.mark.parametrize("items", [True, False], ids=["counted", "not counted"])
@pytest.mark.parametrize("name", ARCHITECTURES if FULL else SAMPLE)
def test_a_swapped_model_with_labels_is_ok(name: str, items: bool, level: str) -> None:
    report = spmd.check(swapped, inputs(items), MESH, options={"name": name}, level=level)
    assert report.ok, str(report)
    lines = [line for line in report.trusted if "as many valid labels" in line]
    assert len(lines) == (0 if items else 1), report.trusted
    assert all(f"{file_name(reduce)}:" in line for line in lines)


@pytest.mark.skipif(not FULL, reason="builds every architecture: make test-full")
@pytest.mark.filterwarnings("ignore")
def test_no_architecture_is_left_out() -> None:
    seconds = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            read_plan(model_of(name))
        except UnsupportedModelError:
            continue
        except Exception:  # noqa: B902 - these sizes do not fit it
            continue
        seconds.append(name)
    # The others have experts, whose code reads values, or a plan of ours: docs/models.md says which are checked.
    assert set(ARCHITECTURES) < set(seconds) and len(seconds) >= 110

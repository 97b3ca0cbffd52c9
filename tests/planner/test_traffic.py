"""The counted collectives of a step, against those that ranks of small models record, to the byte."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from neuronx_dist import comm
from neuronx_dist.planner.candidate import Candidate
from neuronx_dist.planner.traffic import step_traffic
from neuronx_dist.planner.workload import workload_of
from neuronx_dist.planning.layout import Layout
from tests.planner.training import ROWS, SEQ, train
from tests.support.llama import tiny_llama

pytestmark = pytest.mark.slow

Counts = Counter[tuple[str, str, int]]


def case(world: int, *, recompute: str = "", fused_loss: bool = True, **options: Any) -> Candidate:
    sizes: dict[str, Any] = dict(global_batch=ROWS, seq_len=SEQ, dtype="float64", schedule="1f1b")
    return Candidate(Layout(world, **{**sizes, **options}), recompute, fused_loss)


SP = dict(sequence_parallel=True)
CASES: dict[str, tuple[Candidate, dict[str, Any]]] = {
    "tp 2": (case(2, tp=2), {}),
    "tp 2, SP": (case(2, tp=2, num_microbatches=2, **SP), {}),
    "tp 4, kv on 2 ranks": (case(4, tp=4), {}),
    "tp 4, SP, kv on 2 ranks, biases": (case(4, tp=4, **SP), dict(attention_bias=True)),
    "tp 2, logits": (case(2, tp=2, fused_loss=False, **SP), {}),
    "tp 2, recomputed": (case(2, tp=2, recompute="full", **SP), {}),
    "pp 2": (case(2, pp=2, num_microbatches=4), {}),
    "pp 4, tied": (case(4, pp=4, num_microbatches=2), dict(tie_word_embeddings=True)),
    "interleaved": (case(2, pp=2, num_microbatches=4, schedule="interleaved", virtual_pipeline_size=2), {}),
    "zb_v": (case(2, pp=2, num_microbatches=4, schedule="zb_v"), dict(tie_word_embeddings=True)),
    "dp 2": (case(2), {}),
    "dp 4, ZeRO-1": (case(4, zero1=True), dict(intermediate_size=44)),
    "cp 2": (case(2, cp=2), {}),
    "cp 4, equally many bytes by heads and by rings": (case(4, cp=4), {}),
    "tp 4, one kv head": (case(4, tp=4), dict(num_key_value_heads=1)),
    "cp 4, ZeRO-1": (case(4, cp=4, zero1=True), dict(num_attention_heads=6, num_key_value_heads=3, hidden_size=24)),
    "tp 2, cp 2": (case(4, tp=2, cp=2), {}),
    "all": (case(8, tp=2, pp=2, zero1=True, num_microbatches=2, **SP), dict(tie_word_embeddings=True)),
    "float32": (case(4, tp=2, dtype="float32", **SP), {}),
    "bfloat16": (case(4, tp=2, dtype="bfloat16", zero1=True), {}),
    "bfloat16, SP": (case(4, tp=4, dtype="bfloat16", **SP), {}),
    "bfloat16, logits": (case(2, tp=2, dtype="bfloat16", fused_loss=False), {}),
    "float16": (case(4, dtype="float16", zero1=True, pad_vocab=True), {}),
}


def recorded(candidate: Candidate, config: Any) -> tuple[int, Counts]:
    """A rank's second step, without single numbers."""
    stage, _, calls = train(candidate, config)
    return stage, Counter((call.verb, _axis(call.axis), call.bytes) for call in calls if call.shape != ())


def _axis(axis: str) -> str:
    """The axis without the direction of a message, and without the numbers of the stages that share a weight."""
    return "pp_tied" if axis.startswith("pp_tied") else "pp" if axis.startswith("pp_") else axis


OTHERS = {
    "Mixtral": (
        case(4, tp=2, ep=2, **SP),
        "MixtralConfig",
        dict(num_local_experts=4, num_experts_per_tok=2),
    ),
    "DeepSeek": (
        case(4, tp=2, cp=2),
        "DeepseekV3Config",
        dict(
            moe_intermediate_size=16,
            num_key_value_heads=4,
            n_routed_experts=4,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
            **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
            n_group=2,
            topk_group=1,
        ),
    ),
    "Qwen 3": (case(2, tp=2), "Qwen3Config", dict(head_dim=8)),
    "GPT-2": (
        case(4, tp=2, zero1=True, **SP),
        "GPT2Config",
        dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    ),
    "Pythia": (case(4, tp=2, pp=2, num_microbatches=2, **SP), "GPTNeoXConfig", {}),
    "Phi": (case(4, tp=2, pp=2, num_microbatches=2, **SP), "PhiConfig", {}),
    "StarCoder 2": (
        case(4, tp=2, zero1=True, **SP),
        "Starcoder2Config",
        dict.fromkeys(("residual_dropout", "embedding_dropout"), 0.0),
    ),
    "Gemma 2": (case(2, tp=2, fused_loss=False, dtype="float32", **SP), "Gemma2Config", dict(head_dim=8)),
    "Gemma 3": (case(4, tp=2, zero1=True, dtype="float32", **SP), "Gemma3TextConfig", dict(head_dim=8)),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name in ("Pythia", "StarCoder 2", "Gemma 2"))) for name in OTHERS],
)
def test_collectives_of_other_models(name: str) -> None:
    """The number of rows that an expert gets depends on the tokens: these are counted as equally many."""
    import transformers

    candidate, of_config, changes = OTHERS[name]
    base = tiny_llama(use_cache=False).to_dict()
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {key: base[key] for key in (*kept, "vocab_size", "max_position_embeddings", "use_cache")}
    config = getattr(transformers, of_config)(**{**sizes, **changes})
    config._experts_implementation = "eager"  # grouped products have no float64
    workload = workload_of(config)
    predicted = [_without_rows(step_traffic(workload, candidate, stage)) for stage in range(candidate.layout.pp)]
    for stage, found in comm.threads.run(candidate.layout.mesh(), recorded, candidate, config):
        assert _without_rows(found) == predicted[stage]


def _without_rows(counts: Counts) -> Counts:
    found: Counts = Counter()
    for (verb, axis, nbytes), number in counts.items():
        found[verb, axis, 0 if axis == "ep" and verb == "exchange" else nbytes] += number
    return found


# Cases whose parts occur in others.
FULL = (
    *("tp 2", "tp 2, SP", "tp 4, kv on 2 ranks", "dp 2", "cp 2", "tp 2, logits", "tp 2, cp 2", "float32"),
    *("bfloat16, logits", "pp 2"),
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in FULL)) for name in CASES])
def test_recorded_collectives_are_the_counted_ones(name: str) -> None:
    candidate, changes = CASES[name]
    layers = {1: 2, 2: 5, 4: 5}[candidate.layout.pp]
    config = tiny_llama(num_hidden_layers=layers, use_cache=False, **changes)
    workload, layout = workload_of(config), candidate.layout
    layout.check(config)
    predicted = [step_traffic(workload, candidate, stage) for stage in range(layout.pp)]
    for stage, found in comm.threads.run(layout.mesh(), recorded, candidate, config):
        assert found == predicted[stage], (
            stage,
            sorted((found - predicted[stage]).items()),
            sorted((predicted[stage] - found).items()),
        )

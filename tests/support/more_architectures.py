"""Tiny models of more of transformers' architectures, for `hf.swap`: 42 with those of `architectures.py`."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.architectures import (
    _COMMON,
    _GROUPED,
    _NO_DROPOUT,
    _NO_DROPOUT_PROB,
    _TOKENS,
    ARCHITECTURES,
    HEADS,
    HIDDEN,
    VOCAB,
    Architecture,
    tokens,
)

__all__ = ["OF_TRANSFORMERS"]

_MOE: dict[str, Any] = {**_GROUPED, "experts_implementation": "eager", "num_experts_per_tok": 2}
_SHARED: dict[str, Any] = {**_MOE, "moe_intermediate_size": 8, "n_routed_experts": 4, "n_shared_experts": 1}
_MLA: dict[str, Any] = {
    **_SHARED, "num_key_value_heads": HEADS, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4, "v_head_dim": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_HEAD_DIM: dict[str, Any] = {**_GROUPED, "head_dim": 4}


def classes() -> dict[str, torch.Tensor]:
    """Token ids, and a class of each row."""
    return {"input_ids": tokens()["input_ids"], "labels": torch.arange(4) % 2}


def audio() -> dict[str, torch.Tensor]:
    features = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {"input_features": features, "labels": tokens()["labels"]}


def pair() -> dict[str, torch.Tensor]:
    """Inputs of an encoder and a decoder: more input tokens than labels."""
    ids = torch.randint(3, VOCAB, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": tokens()["labels"]}


MORE = [
    Architecture("Gemma", "GemmaForCausalLM", ("GemmaDecoderLayer",), _HEAD_DIM),
    Architecture("GLM", "GlmForCausalLM", ("GlmDecoderLayer",), _HEAD_DIM),
    Architecture("GLM-4", "Glm4ForCausalLM", ("Glm4DecoderLayer",), _HEAD_DIM),
    Architecture("OLMo", "OlmoForCausalLM", ("OlmoDecoderLayer",), _GROUPED),
    Architecture("OLMo 2", "Olmo2ForCausalLM", ("Olmo2DecoderLayer",), _GROUPED),
    Architecture("OLMo 3", "Olmo3ForCausalLM", ("Olmo3DecoderLayer",), {**_GROUPED, "sliding_window": 4}),
    Architecture("Cohere", "CohereForCausalLM", ("CohereDecoderLayer",), _GROUPED),
    Architecture("Granite", "GraniteForCausalLM", ("GraniteDecoderLayer",), _GROUPED),
    Architecture("Granite MoE", "GraniteMoeForCausalLM", ("GraniteMoeDecoderLayer",), {**_MOE, "num_local_experts": 4}),
    Architecture("StableLM", "StableLmForCausalLM", ("StableLmDecoderLayer",), {**_GROUPED, **_NO_DROPOUT}),
    Architecture(
        "Starcoder 2",
        "Starcoder2ForCausalLM",
        ("Starcoder2DecoderLayer",),
        {**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0, "sliding_window": None},
    ),
    Architecture("Nemotron", "NemotronForCausalLM", ("NemotronDecoderLayer",), _HEAD_DIM),
    Architecture("SmolLM3", "SmolLM3ForCausalLM", ("SmolLM3DecoderLayer",), _GROUPED),
    Architecture(
        "Qwen 3 MoE",
        "Qwen3MoeForCausalLM",
        ("Qwen3MoeDecoderLayer",),
        {**_MOE, "head_dim": 4, "num_experts": 4, "moe_intermediate_size": 8, "decoder_sparse_step": 1},
    ),
    Architecture(
        "OLMoE", "OlmoeForCausalLM", ("OlmoeDecoderLayer",), {**_MOE, "num_experts": 4, "intermediate_size": 8}
    ),
    Architecture("DeepSeek V3", "DeepseekV3ForCausalLM", ("DeepseekV3DecoderLayer",), _MLA),
    Architecture("DeepSeek V2", "DeepseekV2ForCausalLM", ("DeepseekV2DecoderLayer",), _MLA),
    Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        ("GptOssDecoderLayer",),
        {**_MOE, "head_dim": 4, "num_local_experts": 4, "sliding_window": 4},
    ),
    Architecture(
        "GPT-J",
        "GPTJForCausalLM",
        ("GPTJBlock",),
        {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": 16, "rotary_dim": 4, **_TOKENS}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        ("n_layer",),
    ),
    Architecture(
        "Falcon",
        "FalconForCausalLM",
        ("FalconDecoderLayer",),
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "new_decoder_architecture": True}
        | {"num_kv_heads": 4, **_TOKENS, **_NO_DROPOUT},
    ),
    Architecture(
        "Falcon (ALiBi)",
        "FalconForCausalLM",
        ("FalconDecoderLayer",),
        {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "alibi": True, "multi_query": False}
        | {**_TOKENS, **_NO_DROPOUT},
    ),
    Architecture(
        "RoBERTa",
        "RobertaForMaskedLM",
        ("RobertaLayer",),
        {**_COMMON, **_TOKENS, **_NO_DROPOUT_PROB},
    ),
    Architecture(
        "BERT (classification)",
        "BertForSequenceClassification",
        ("BertLayer",),
        {**_COMMON, **_NO_DROPOUT_PROB},
        inputs=classes,
    ),
    Architecture(
        "Llama (classification)", "LlamaForSequenceClassification", ("LlamaDecoderLayer",), _GROUPED, inputs=classes
    ),
    Architecture(
        "DistilBERT",
        "DistilBertForMaskedLM",
        ("TransformerBlock",),
        {"vocab_size": VOCAB, "dim": HIDDEN, "n_heads": HEADS, "hidden_dim": 24, "max_position_embeddings": 16}
        | {"dropout": 0.0, "attention_dropout": 0.0, "pad_token_id": 0},
        ("n_layers",),
    ),
    Architecture(
        "BART",
        "BartForConditionalGeneration",
        ("BartEncoderLayer", "BartDecoderLayer"),
        {"vocab_size": VOCAB, "d_model": HIDDEN, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
        | {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 16, "dropout": 0.0, **_TOKENS}
        | {"decoder_start_token_id": 2, "forced_eos_token_id": None},
        ("encoder_layers", "decoder_layers"),
        inputs=pair,
    ),
    Architecture(
        "Whisper",
        "WhisperForConditionalGeneration",
        ("WhisperEncoderLayer", "WhisperDecoderLayer"),
        {"vocab_size": VOCAB, "d_model": HIDDEN, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS}
        | {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 6, "dropout": 0.0}
        | {"max_target_positions": 16, "decoder_start_token_id": 2, "suppress_tokens": None, **_TOKENS}
        | {"begin_suppress_tokens": None},
        ("encoder_layers", "decoder_layers"),
        inputs=audio,
    ),
]

OF_TRANSFORMERS = [architecture for architecture in ARCHITECTURES if isinstance(architecture.model, str)] + MORE

"""The words of transformers' tensor-parallel plans, ours beside them, and the plans of architectures without one.

A word says how a layer, a module or a bare parameter is sharded over tp (`model_plan.py` reads words, `swap.py` applies
them). A word of transformers has the meaning that it has there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..nearest import nearest

__all__ = [
    "CORRECTIONS",
    "LAYER_STYLES",
    "PLANS",
    "WORDS",
    "alternatives",
    "listed_words",
    "plan_of_ours",
    "refusal_of",
]

# transformers' word -> our style. The styles of LAYER_STYLES replace a layer; the others change a module in place.
WORDS = {
    "colwise": "column",
    "rowwise": "row",
    "replicated_with_grad_allreduce": "partial_gradient",
    "colwise_gather_output": "gathered_column",
    "colwise_rep": "gathered_column",
    "rowwise_split_input": "split_row",
    "rowwise_rep": "split_row",
    "packed_colwise": "packed_column",
    "packed_rowwise": "packed_row",
    "embedding_rowwise": "embedding",
    "embedding_colwise": "embedding_columns",
    "moe_tp_experts": "experts",
    "moe_identity_expert": "identity_expert",
    "mla_kv_a_proj": "latent",
    "all_reduce": "summed",
    "sequence_parallel": "whole",  # of norms, which `sequence_parallel=True` makes so
    "local_params": "whole",
    "replicate": "whole",
    # Ours:
    "packed_colwise_3": "packed_column_3",  # query, key and value in one matrix, behind one another
    "embedding_heads": "embedding_heads",  # a table with a column for each head, whose columns stay local
    "replicated_bias": "replicated_bias",  # a bias that is added to partial sums
    "local_heads": "local_heads",  # a module with arguments for all heads, of which it takes its heads
}

# Style -> the style of `parallel_layers.replace`, and options.
LAYER_STYLES: dict[str, tuple[str, dict[str, Any]]] = {
    "column": ("column", {}),
    "gathered_column": ("column", {"gather_output": True}),
    "packed_column": ("column", {"stride": 2}),
    "packed_column_3": ("column", {"stride": 3}),
    "row": ("row", {}),
    "split_row": ("row", {"input_is_parallel": False}),
    "packed_row": ("row", {"stride": 2}),
    "embedding": ("embedding", {}),
    "embedding_columns": ("embedding_columns", {}),
    "embedding_heads": ("embedding_columns", {"collect_output": False}),
}

_EXPERT_AXIS = (
    "it distributes whole experts over an expert axis; over tp the word is 'moe_tp_experts' on the module of the "
    "experts, with 'packed_colwise' and 'rowwise' on their matrices"
)
_REFUSED = {"grouped_gemm": _EXPERT_AXIS, "ep_dispatch_experts": _EXPERT_AXIS}


def listed_words() -> str:
    return ", ".join(WORDS)


def refusal_of(word: str) -> str | None:
    """Returns why a plan may not have a word, and the alternative; None: it may."""
    if word in WORDS:
        return None
    if word in _REFUSED:
        return f"the style {word!r}: {_EXPERT_AXIS}"
    return f"the unknown style {word!r} (nearest: {nearest(word, WORDS)}); the styles are {listed_words()}"


# --- plans, by model type, where transformers has none or a wasteful one ---------------------------------------------
#
# A name may have alternatives, `layers.*.(q|k|v)`: each gets the word.

_LLAMA = {
    "model.layers.*.self_attn.(q_proj|k_proj|v_proj)": "colwise",
    "model.layers.*.mlp.(gate_proj|up_proj)": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
_BERT = {
    "*.layer.*.attention.self.(query|key|value)": "colwise",
    "*.layer.*.crossattention.self.(query|key|value)": "colwise",
    "*.layer.*.(attention|crossattention).output.dense": "rowwise",
    "*.layer.*.intermediate.dense": "colwise",
    "*.layer.*.output.dense": "rowwise",
}
_VIT = {
    "*.layers.*.attention.(q_proj|k_proj|v_proj)": "colwise",
    "*.layers.*.attention.o_proj": "rowwise",
    "*.layers.*.mlp.fc1": "colwise",
    "*.layers.*.mlp.fc2": "rowwise",
}
# Encoders and decoders of the BART family, Whisper and CLIP.
_BART = {
    "*.layers.*.(self_attn|encoder_attn).(q_proj|k_proj|v_proj)": "colwise",
    "*.layers.*.(self_attn|encoder_attn).out_proj": "rowwise",
    "*.layers.*.fc1": "colwise",
    "*.layers.*.fc2": "rowwise",
    "*.layers.*.mlp.fc1": "colwise",
    "*.layers.*.mlp.fc2": "rowwise",
}
_T5 = {
    "*.block.*.layer.*.(SelfAttention|EncDecAttention).(q|k|v)": "colwise",
    "*.block.*.layer.*.(SelfAttention|EncDecAttention).o": "rowwise",
    "*.block.*.layer.*.SelfAttention.relative_attention_bias": "embedding_heads",
    "*.block.*.layer.*.DenseReluDense.(wi|wi_0|wi_1)": "colwise",
    "*.block.*.layer.*.DenseReluDense.wo": "rowwise",
}
_GPT2 = {
    "*.h.*.attn.c_attn": "packed_colwise_3",
    "*.h.*.attn.c_proj": "rowwise",
    "*.h.*.mlp.c_fc": "colwise",
    "*.h.*.mlp.c_proj": "rowwise",
}
_GPTJ = {
    "*.h.*.attn.(q_proj|k_proj|v_proj)": "colwise",
    "*.h.*.attn.out_proj": "rowwise",
    "*.h.*.mlp.fc_in": "colwise",
    "*.h.*.mlp.fc_out": "rowwise",
}
_GPT_NEO = {
    "*.h.*.attn.attention.(q_proj|k_proj|v_proj)": "colwise",
    "*.h.*.attn.attention.out_proj": "rowwise",
    "*.h.*.mlp.c_fc": "colwise",
    "*.h.*.mlp.c_proj": "rowwise",
}
_BLOOM = {
    "*.h.*.self_attention": "local_heads",
    "*.h.*.self_attention.query_key_value": "colwise",
    "*.h.*.self_attention.dense": "rowwise",
    "*.h.*.mlp.dense_h_to_4h": "colwise",
    "*.h.*.mlp.dense_4h_to_h": "rowwise",
}
# Its matrices hold the query heads and, behind them all, the one key/value head.
_FALCON_MULTI_QUERY = {
    **_BLOOM,
    "*.h.*.self_attention": "replicate",
    "*.h.*.self_attention.query_key_value": "colwise_gather_output",
    "*.h.*.self_attention.dense": "rowwise_split_input",
}
_ALBERT = {
    "*.albert_layers.*.attention.(query|key|value)": "colwise",
    "*.albert_layers.*.attention.dense": "rowwise",
    "*.albert_layers.*.attention.LayerNorm": "replicate",
    "*.albert_layers.*.full_layer_layer_norm": "replicate",
    "*.albert_layers.*.ffn": "colwise",
    "*.albert_layers.*.ffn_output": "rowwise",
}
_DISTILBERT = {
    "*.layer.*.attention.(q_lin|k_lin|v_lin)": "colwise",
    "*.layer.*.attention.out_lin": "rowwise",
    "*.layer.*.ffn.lin1": "colwise",
    "*.layer.*.ffn.lin2": "rowwise",
}
_GPT_OSS = {
    **{name: word for name, word in _LLAMA.items() if "self_attn" in name},
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.mlp.experts": "moe_tp_experts",
    # [experts, in, out]: of the matrix for gate and up, whose columns alternate, the last dim
    "model.layers.*.mlp.experts.(gate_up_proj|gate_up_proj_bias)": "rowwise",
    "model.layers.*.mlp.experts.down_proj": "colwise",
    "model.layers.*.mlp.experts.down_proj_bias": "replicated_bias",
}
_GLM = {
    "model.layers.*.self_attn.(q_proj|k_proj|v_proj)": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}
_PHI3 = {
    **{name: word for name, word in _GLM.items() if "mlp" in name},
    "model.layers.*.self_attn.qkv_proj": "colwise_gather_output",
    "model.layers.*.self_attn.o_proj": "rowwise_split_input",
}

# Its norms of queries and keys are of all heads together.
_ESMC = {
    "*layers.*.self_attn.(q_proj|k_proj|v_proj)": "colwise_gather_output",
    "*layers.*.self_attn.o_proj": "rowwise_split_input",
    "*layers.*.mlp.(gate_proj|up_proj)": "colwise",
    "*layers.*.mlp.down_proj": "rowwise",
}

PLANS: dict[str, Mapping[str, str]] = {
    "stablelm": _LLAMA,
    "gpt2": _GPT2,
    "gptj": _GPTJ,
    "gpt_neo": _GPT_NEO,
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "opt": _BART,
    "biogpt": _BART,
    "bart": _BART,
    "mbart": _BART,
    "marian": _BART,
    "pegasus": _BART,
    "m2m_100": _BART,
    "whisper": _BART,
    **dict.fromkeys(("clip", "clip_text_model", "clip_vision_model"), _BART),
    **dict.fromkeys(("siglip", "siglip_text_model", "siglip_vision_model"), _BART),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "distilbert": _DISTILBERT,
    "albert": _ALBERT,
    "mamba": {"*.layers.*.mixer": "replicate"},  # its kernel takes whole weights
    "t5": _T5,
    "mt5": _T5,
    "vit": _VIT,
    "esmc": _ESMC,
    "gpt_oss": _GPT_OSS,
    "glm": _GLM,
    "glm4": _GLM,
    "phi3": _PHI3,
}


# Words in place of transformers' where these are wrong: they cut a matrix of gate and up as one block.
CORRECTIONS: dict[str, Mapping[str, str]] = dict.fromkeys(
    ("inkling_text", "inkling2_text"), {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
)


def plan_of_ours(config: Any) -> dict[str, str]:
    """Returns our plan of a model, its alternatives written out; empty: there is none."""
    words: Mapping[str, str] = PLANS.get(config.model_type, {})
    if config.model_type == "falcon" and config.multi_query and not config.new_decoder_architecture:
        words = _FALCON_MULTI_QUERY
    return {name: word for pattern, word in words.items() for name in alternatives(pattern)}


def alternatives(pattern: str) -> list[str]:
    """`layers.*.(q|k)` -> `layers.*.q`, `layers.*.k`."""
    found = re.search(r"\(([^)]*)\)", pattern)
    if found is None:
        return [pattern]
    return [name for part in found[1].split("|") for name in alternatives(pattern.replace(found[0], part, 1))]

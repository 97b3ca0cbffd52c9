"""Tiny models of every configuration of transformers that has a tensor-parallel plan."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["classes_with_plans", "inputs_of", "model_of"]

VOCAB, SEQ = 32, 8
# By attribute: what makes a model tiny.
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "sliding_window": 4, "shared_expert_intermediate_size": 16, "moe_shared_expert_intermediate_size":
    16, "attention_dropout": 0.0, "hidden_dropout": 0.0, "residual_dropout": 0.0, "embedding_dropout": 0.0,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 2, "shared_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_topk": 2,
    "index_n_heads": 4, "index_kpool": 4, "index_head_dim": 8, "index_topk": 4,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4,
    "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 4, "mamba_n_groups": 1, "n_groups": 1,
    "mamba_chunk_size": 4, "chunk_size": 4, "mlp_hidden_size": 32, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
    "zero_expert_num": 2, "moe_layer_start_index": 0, "vocab_size_per_layer_input": VOCAB, "use_cache": False,
    "hidden_size_per_layer_input": 8, "laurel_rank": 4, "num_kv_shared_layers": 0, "global_head_dim": 8,
    "num_global_key_value_heads": 2, "image_size": 16, "patch_size": 4, "num_channels": 3, "top_k_experts": 2,
    "expert_intermediate_size": 16, "num_experts_per_token": 2, "moe_top_k": 2, "kv_channels": 8, "lora_rank": 4,
    "num_layers": 2, "depth": 2, "num_heads": 4, "embed_dim": 32, "intermediate_size_mlp": 48, "initializer_range": 0.2,
    "num_nextn_predict_layers": 0, "mamba_expand": 2, "mamba_dt_rank": 4, "attn_temperature_tuning": False,
    "per_layer_input_vocab_size": VOCAB, "conv_dim": 32, "block_ff_dim": 48, "mlp_bias": False, "attention_bias": True,
    "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_v_head_dim": 8,
}  # fmt: skip


@cache
def classes_with_plans() -> dict[str, type]:
    """Configurations by name."""
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")):
        if "base_model_tp_plan" in file.read_text():
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            for name, value in vars(module).items():
                own = inspect.isclass(value) and value.__module__ == module.__name__
                if own and getattr(value, "base_model_tp_plan", None):
                    found[name] = value
    return found


def _model_classes(config_class: type) -> list[Any]:
    """The models of a configuration, causal LMs first."""
    folder = Path(inspect.getfile(config_class)).parent
    found = []
    for file in sorted(folder.glob("modeling_*.py")):
        module = importlib.import_module(f"{config_class.__module__.rpartition('.')[0]}.{file.stem}")
        for value in vars(module).values():
            is_model = inspect.isclass(value) and issubclass(value, transformers.PreTrainedModel)
            is_ours = is_model and value.__module__ == module.__name__ and value.config_class is config_class
            if is_ours and not value.__name__.endswith("PreTrainedModel"):
                found.append(value)
    order = ("ForCausalLM", "TextModel", "Model")
    rank = {cls: next((i for i, end in enumerate(order) if cls.__name__.endswith(end)), 9) for cls in found}
    return sorted(found, key=lambda cls: (rank[cls], len(cls.__name__)))


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
HALF_MROPE = {
    "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    "hidden_size": 64,
    "head_dim": 16,
}
LATENT: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": None}
ERNIE = {"moe_intermediate_size": [16, 16], "moe_num_experts": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("AXK1Config", "AXK2Config", "DeepseekV2Config", "DeepseekV3Config", "DeepseekV32Config"), LATENT),
    **dict.fromkeys(("Glm4MoeLiteConfig", "GlmMoeDsaConfig", "Mistral4Config", "MistralLarge4TextConfig"), LATENT),
    **dict.fromkeys(("MiniCPM3Config", "KimiLinearConfig"), LATENT),
    "Glm5NextTextConfig": {**LATENT, "index_topk": 16, "qk_rope_head_dim": 0},
    **dict.fromkeys(("Cosmos3EdgeTextConfig", "PaddleOCRTextConfig", "Qwen2VLTextConfig"), MROPE),
    **dict.fromkeys(("Qwen2_5OmniTextConfig", "Qwen2_5_VLTextConfig"), MROPE),
    **dict.fromkeys(("Glm4vTextConfig", "Glm4vMoeTextConfig", "GlmImageTextConfig", "GlmOcrTextConfig"), HALF_MROPE),
    "EsmcConfig": {"num_key_value_heads": 4},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": ROPE}},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
    "LongcatFlashConfig": {"num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 16},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 16},
    "Dots3NoteTextConfig": {"num_key_value_heads": 4},
    "NeoMMEConfig": {"head_dim": 16},
    "Lfm2MoeConfig": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "YoutuConfig": LATENT,
    "Llama4VisionConfig": {
        "intermediate_size": 128,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    **dict.fromkeys(("Ernie4_5_VLMoeTextConfig", "Ernie4_5_VL_MoeTextConfig"), ERNIE),
    "InternLM3Config": {"attention_bias": False},
}


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # sizes that may differ between layers
        return True


def config_of(name: str) -> Any:
    config_class = classes_with_plans()[name]
    default = config_class()
    sizes = {key: value for key, value in TINY.items() if _has(default, key)} | SPECIAL.get(name, {})
    config = config_class(**{key: value for key, value in sizes.items() if value is not None})
    config._experts_implementation = "eager"
    config.use_cache = False
    return config


def model_of(name: str) -> Any:
    """A tiny model in float64 in training mode, equal at every call."""
    config = config_of(name)
    classes = _model_classes(type(config))
    build = classes[0] if classes else transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(param.numel() for param in build(config).parameters())
    if size > 8_000_000:
        raise ValueError(f"{name} has {size} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config).double().train()
        with torch.no_grad():
            for param in model.parameters():
                if not (param.isfinite().all() and param.abs().max() < 1e3):  # memory that nothing initialises
                    param.normal_(0, 0.2)
                if param.ndim == 1 or not param.any():
                    param.add_(torch.randn_like(param) * 0.1)
    return model


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, SEQ), generator=generator)
    accepted = inspect.signature(model.forward).parameters
    if "input_ids" not in accepted:
        pixels = torch.randn(2, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels}
    if "OmniMoeTalker" in type(model.config).__name__:
        return {"inputs_embeds": torch.randn(2, SEQ, 32, generator=generator, dtype=torch.float64)}
    if "t_cond" in accepted:
        return {"input_ids": ids, "t_cond": torch.randn(2, 1, 32, generator=generator, dtype=torch.float64)}
    return {"input_ids": ids, "labels": ids} if "labels" in accepted else {"input_ids": ids}

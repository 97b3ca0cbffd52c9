"""Unmodified Hugging Face models, tiny: made from a config, without dropout, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from tests.parallelize.support import registered_ops

HIDDEN = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
IMAGE = {"image_size": 8, "patch_size": 4, "num_labels": 4}


def _language(name: str, arguments: dict[str, Any], **config: Any) -> tuple[nn.Module, dict[str, Any]]:
    kind = {"gpt2": "GPT2", "t5": "T5"}.get(name, name.capitalize())
    head = {"T5": "ForConditionalGeneration", "GPT2": "LMHeadModel", "Bert": "ForMaskedLM"}.get(kind, "ForCausalLM")
    settings = getattr(transformers, f"{kind}Config")(pad_token_id=0, bos_token_id=1, eos_token_id=2, **config)
    module = getattr(transformers, kind + head)(settings)
    tokens = torch.randint(3, 64, (2, 8))
    return module, {"input_ids": tokens, "labels": tokens.clone(), **arguments}


def _image(name: str, module: nn.Module, size: int) -> tuple[nn.Module, dict[str, Any]]:
    return module, {"pixel_values": torch.randn(4, 3, size, size), "labels": torch.tensor([1, 2, 0, 3])}


def _vit() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.ViTConfig(**{**HIDDEN, "num_attention_heads": 4, **IMAGE})
    return _image("vit", transformers.ViTForImageClassification(config), 8)


def _resnet() -> tuple[nn.Module, dict[str, Any]]:
    sizes: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    config = transformers.ResNetConfig(**sizes, num_labels=4)
    return _image("resnet", transformers.ResNetForImageClassification(config), 32)


def _experts(layer: nn.Module, *routed: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = registered_ops.experts(*routed, layer.gate_up_proj, layer.down_proj)
    return result


def _mixtral() -> tuple[nn.Module, dict[str, Any]]:
    """A Mixtral whose experts, which ask which of them have tokens, are one registered function."""
    ALL_EXPERTS_FUNCTIONS.register("registered", _experts)
    module, arguments = _language("mixtral", UNCACHED, **HIDDEN, **HEADS, num_local_experts=4, num_experts_per_tok=2)
    module.config._experts_implementation = "registered"
    return module, arguments


UNCACHED = {"use_cache": False}
HF_MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "llama": lambda: _language("llama", UNCACHED, **HIDDEN, **HEADS),
    "gpt2": lambda: _language(
        "gpt2", UNCACHED, vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "bert": lambda: _language(
        "bert", {}, **HIDDEN, num_attention_heads=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "qwen3": lambda: _language("qwen3", UNCACHED, **HIDDEN, **HEADS, head_dim=8),
    "gemma2": lambda: _language("gemma2", UNCACHED, **HIDDEN, **HEADS, head_dim=8),
    "t5": lambda: _language(
        "t5", UNCACHED, vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        dropout_rate=0.0, decoder_start_token_id=0,
    ),
    "vit": _vit,
    "resnet": _resnet,
    "mamba": lambda: _language(
        "mamba", UNCACHED, vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=1, conv_kernel=4
    ),
    "mixtral": _mixtral,
}  # fmt: skip
IN_FLOAT32 = {"llama", "qwen3", "gemma2", "t5", "mamba", "mixtral"}
"""They compute norms or angles in float32, whatever their dtype."""


def hf_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model in float64, and arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module, arguments = HF_MODELS[name]()
    floats = {key: x.double() for key, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    return module.double(), {**arguments, **floats}

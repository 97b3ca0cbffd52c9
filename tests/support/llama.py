"""The config of a tiny Llama, for all tests that need one."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig

__all__ = ["tiny_llama"]


def tiny_llama(**changes: Any) -> LlamaConfig:
    """Returns a Llama's config with small sizes that tp 2 divides, and `changes`."""
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return LlamaConfig(**{"vocab_size": 96, "max_position_embeddings": 64, **sizes, **changes})

"""A causal LM that transformers knows nothing of: what the swap asks of a model, and no more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

PLAN = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
}


class Attention(nn.Module):
    num_key_value_groups = 2

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, names: str = "qkvo") -> None:
        super().__init__()
        q, k, v, o = (f"{name}_proj" for name in names)
        self.add_module(q, nn.Linear(hidden, heads * head_dim, bias=False))
        self.add_module(k, nn.Linear(hidden, kv_heads * head_dim, bias=False))
        self.add_module(v, nn.Linear(hidden, kv_heads * head_dim, bias=False))
        self.add_module(o, nn.Linear(heads * head_dim, hidden, bias=False))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(hidden, inner), nn.Linear(inner, hidden)


class Layer(nn.Module):
    def __init__(self, attention: Attention, mlp: MLP, hidden: int) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(hidden)
        self.self_attn, self.mlp = attention, mlp


class Base(nn.Module):
    def __init__(self, vocab: int, hidden: int, layers: list[Layer]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(layers)
        self.final_norm = nn.LayerNorm(hidden)


class Toy(nn.Module):
    """A model of `heads` over `kv_heads`; on meta."""

    def __init__(self, heads: int = 4, kv_heads: int = 2, layers: int = 2, names: str = "qkvo", **config: Any) -> None:
        super().__init__()
        with torch.device("meta"):
            blocks = [Layer(Attention(8, heads, kv_heads, 2, names), MLP(8, 12), 8) for _ in range(layers)]
            self.model = Base(20, 8, blocks)
            self.lm_head = nn.Linear(8, 20, bias=False)
        sizes = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, num_hidden_layers=layers, vocab_size=20)
        self.config: Any = SimpleNamespace(**{"model_type": "toy", **sizes, **config})
        self.config.get_text_config = lambda: self.config
        changed = dict(zip("qkvo", names))
        self.tp_plan = {
            name.replace(f"{old}_proj", f"{new}_proj") if "attn" in name else name: style
            for name, style in PLAN.items()
            for old, new in [(name[-6], changed.get(name[-6], name[-6]))]
        }

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        return self.lm_head

"""`swap(model, plan="derived")`: the plan is derived from the forward of the module itself."""

from __future__ import annotations

import copy
import os
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuronx_dist import comm, hf, spmd
from neuronx_dist.hf import UnsupportedModelError
from neuronx_dist.hf.derived import derive
from neuronx_dist.hf.plan_reading import read_plan
from neuronx_dist.mesh import Mesh
from tests.hf.parity import differences
from tests.hf.test_architectures import wrong
from tests.support.architectures import HEADS, HIDDEN, VOCAB, Architecture, images, tokens
from tests.support.more_architectures import OF_TRANSFORMERS

FULL = os.environ.get("NXD_FULL") == "1"
BY_NAME = {each.name: each for each in OF_TRANSFORMERS}


# --- hand-written models


class Attention(nn.Module):
    """Attention as timm has it: one matrix, `[3, heads, head_dim]`."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm = nn.LayerNorm(self.head_dim)
        self.attn_drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        qkv = self.qkv(x).reshape(batch, seq, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = self.attn_drop((self.q_norm(q) @ k.transpose(-2, -1) * self.head_dim**-0.5).softmax(-1))
        return self.proj((weights @ v).transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    """A layer whose feed-forward part has gate and up in one matrix, and learned scales."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, dropout)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)
        self.scale = nn.Parameter(torch.randn(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.attn(self.norm1(x))
        gate, up = self.fc1(self.norm2(x)).chunk(2, dim=-1)
        return x + self.fc2(F.silu(gate) * up)


class Model(nn.Module):
    """A decoder that names neither its ends nor a config, with tied weights."""

    def __init__(self, make: Any = Block, heads: int = HEADS, dim: int = HIDDEN, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(8 * dim, dim)
        self.blocks = nn.ModuleList(make(dim, heads, **options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 8 * dim, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return (self.head(self.norm(x)),)


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    return Model(**options).double()


IDS = {"input_ids": torch.randint(3, VOCAB, (4, 6), generator=torch.Generator().manual_seed(0))}


def derived(of: Any, inputs: Any, tp: int, **options: Any) -> dict[str, float]:
    """Returns the differences of a derived swap that are too large."""
    without = {name: x for name, x in inputs.items() if name != "labels"}
    if getattr(of.config, "is_encoder_decoder", False) if hasattr(of, "config") else False:
        without["decoder_input_ids"] = inputs["labels"].clamp(min=0)
    return wrong(differences(of, inputs, tp, plan="derived", **{"inputs": without, **options}))


@pytest.mark.parametrize("tp", [2, 4])
def test_a_hand_written_model(tp: int) -> None:
    assert derived(model(), IDS, tp) == {}


def test_its_words() -> None:
    found = derive(model(), IDS, 2)
    assert {name: word for name, word in found.words.items() if word != "replicate"} == {
        "embed": "embedding_rowwise",
        "head": "colwise_gather_output",
        **{
            f"blocks.{number}.{name}": word
            for number in (0, 1)
            for name, word in {
                "attn.qkv": "packed_colwise_3",
                "attn.proj": "rowwise",
                "attn.q_norm": "replicated_with_grad_allreduce",
                "fc1": "packed_colwise",
                "fc2": "rowwise",
            }.items()
        },
    }
    assert found.attributes == {f"blocks.{number}.attn": {"num_heads": 2} for number in (0, 1)}

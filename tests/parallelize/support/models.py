"""Modules that `parallelize` is tried on, with arguments: small, and each with something of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, BATCH, LENGTH, VOCABULARY = 16, 8, 8, 32


class Mlp(nn.Module):
    """The seed's example: a dict in, the loss out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
        self.loss_fn = nn.BCELoss()

    def forward(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        x = data["data"]
        for layer in self.layers:
            x = layer(x)
        return self.loss_fn(torch.sigmoid(x), data["target"])


class Block(nn.Module):
    """Attention by one weight of queries, keys and values, and an MLP."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Gpt(nn.Module):
    """Two blocks between one embedding and itself, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Conv(nn.Module):
    """Convolutions with batch norm, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1)
        )
        self.group = nn.GroupNorm(4, 8)
        self.last = nn.Linear(8, 4)
        self.last.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.group(self.body(x)).relu().mean((2, 3))
        return F.cross_entropy(self.last(x), labels)


class Pair(nn.Module):
    """Two inputs, one with a gradient, two outputs; a parameter that nothing reads, and a default argument."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
        h = torch.tanh(self.left(x)) * scale
        return {"h": h, "more": (self.right(h) - y, None)}


class Rotary(nn.Module):
    """Attention with rotary embeddings, and an MLP with a gate; no loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        angles = torch.arange(LENGTH)[:, None] / 10 ** torch.tensor([0.0, 2.0])
        self.register_buffer("cos", torch.cat([angles, angles], 1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], 1).sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).view(*x.shape[:2], 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.silu(self.gate(x)) * self.up(x))

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, -1)
        return x * self.cos + torch.cat([-right, left], -1) * self.sin


class Skip(nn.Module):
    """The first value is read in the last layer; a buffer that is written, a layer without parameters at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layers[1].bias.requires_grad_(False)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first = x = self.layers[0](data["x"])
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        x = self.norm(x + first)
        return (x - data["target"]).pow(2).sum(), x


def _mlp() -> tuple[nn.Module, dict[str, Any]]:
    return Mlp(), {"data": {"data": torch.randn(BATCH, WIDTH), "target": torch.rand(BATCH, WIDTH)}}


def _gpt() -> tuple[nn.Module, dict[str, Any]]:
    labels = torch.randint(0, VOCABULARY, (4, LENGTH))
    labels[0, :3] = -100
    return Gpt(), {"tokens": torch.randint(0, VOCABULARY, (4, LENGTH)), "labels": labels}


def _conv() -> tuple[nn.Module, dict[str, Any]]:
    return Conv(), {"x": torch.randn(4, 4, 6, 6), "labels": torch.randint(0, 4, (4,))}


def _pair() -> tuple[nn.Module, dict[str, Any]]:
    return Pair(), {"x": torch.randn(BATCH, WIDTH, requires_grad=True), "y": torch.randn(BATCH, WIDTH)}


def _skip() -> tuple[nn.Module, dict[str, Any]]:
    return Skip(), {"data": {"x": torch.randn(BATCH, WIDTH), "target": torch.rand(BATCH, WIDTH)}}


def _rotary() -> tuple[nn.Module, dict[str, Any]]:
    return Rotary(), {"x": torch.randn(4, LENGTH, WIDTH)}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "conv": _conv,
    "pair": _pair,
    "rotary": _rotary,
    "skip": _skip,
}


def model(name: str, seed: int = 0) -> tuple[nn.Module, dict[str, Any]]:
    """A module of the table in float64, and arguments."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module, arguments = MODELS[name]()
    return module.double(), _double(arguments)


def _double(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _double(item) for key, item in x.items()}
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x

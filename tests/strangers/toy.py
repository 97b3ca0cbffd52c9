"""A small model for tests of others' code: tensor-parallel, with a replicated norm; its data; its reference."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.weights.shard_spec import gather_full, named_specs

VOCABULARY, HIDDEN, BATCH, SEQ = 32, 16, 8, 6


class Net(nn.Module):
    """Embedding, norm, two linear layers with a residual connection, logits; `forward` returns the mean loss."""

    def __init__(self, dtype: torch.dtype = torch.float64, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        options: Any = {"dtype": dtype, "sequence_parallel_enabled": sequence_parallel}
        self.embed = nxd.ParallelEmbedding(VOCABULARY, HIDDEN, **options)
        self.norm = nxd.LayerNorm(HIDDEN, **options)
        self.up = nxd.ColumnParallelLinear(HIDDEN, 2 * HIDDEN, gather_output=False, **options)
        self.down = nxd.RowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **options)
        self.head = nxd.ColumnParallelLinear(HIDDEN, VOCABULARY, bias=False, gather_output=False, **options)
        generator = torch.Generator().manual_seed(0)  # ranks as threads share torch's
        with torch.no_grad():
            for _, param, spec in named_specs(self):
                whole = torch.randn(spec.full_shape, generator=generator, dtype=torch.float64) / HIDDEN**0.5
                param.copy_(spec.local_slice(whole, comm.rank("tp")))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        logits = self.head(x)
        return nxd.parallel_cross_entropy(logits.transpose(0, 1) if self.sequence_parallel else logits, labels).mean()


def batch(step: int, part: int = 0, parts: int = 1) -> dict[str, torch.Tensor]:
    """Returns one of equal parts of the global batch `[BATCH, SEQ]` of a step."""
    text = torch.randint(VOCABULARY, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))
    rows = text.chunk(parts)[part]
    return {"ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}


def local_batch(step: int) -> dict[str, torch.Tensor]:
    """The part of the global batch of this data-parallel rank."""
    return batch(step, comm.rank("dp"), comm.size("dp"))


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Complete parameters, gathered over tp, without the prefixes of wrappers."""
    return {name.replace("module.", ""): gather_full(param, spec).clone() for name, param, spec in named_specs(model)}


def trained_alone(
    steps: int = 3, lr: float = 0.5, max_norm: float = math.inf
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the global batches and weights after SGD with torch's clipping, in one process."""
    with comm.as_rank(Mesh(1), 0):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        losses = []
        for step in range(steps):
            loss = model(**batch(step))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, whole_weights(model)


def average_of(model: nn.Module, train: Callable[[nn.Module], Any]) -> nn.Module:
    """Returns torch's average of the model after each of three steps."""
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        train(model)
        averaged.update_parameters(model)
    module: nn.Module = averaged.module
    return module


def by_torch_save(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


def by_safetensors(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(safetensors.torch.save({name: value.clone() for name, value in state.items()}))


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error)
    return "not refused"

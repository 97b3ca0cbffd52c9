"""Recomputed parts of swapped models: loss and gradients are equal to the bit, and fewer bytes are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers.activation_checkpoint import checkpoint_layers
from tests.hf.models import SIZES, VOCAB, llama_config, reference_model

LENGTH = 64
_MOE = dict(
    SIZES,
    num_hidden_layers=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=32,
    decoder_sparse_step=1,
    initializer_range=0.2,
    use_cache=False,
)


def llama(attention: str = "eager", dropout: float = 0.3, layers: int = 2) -> Any:
    model = reference_model(llama_config(layers=layers, attention_dropout=dropout), LlamaForCausalLM)
    model.set_attn_implementation(attention)
    return model


def experts() -> Any:
    model = reference_model(Qwen2MoeConfig(**_MOE), Qwen2MoeForCausalLM)
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def batch_of_rank() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    return nxd.get_batch_on_this_context_parallel_rank({"input_ids": ids, "labels": ids.clone()}, balance="zigzag")


def step(make: Callable[[], Any], prepare: Callable[[Any], Any], **options: Any) -> tuple[int, list[torch.Tensor]]:
    """Bytes that a rank has saved after the forward, and the loss and all gradients of a step."""
    nxd.model_parallel_manual_seed(3)
    model = nxd.hf.swap(make(), **options).train()
    prepare(model)
    nxd.model_parallel_manual_seed(3)
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() * (not isinstance(x, nn.Parameter))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**batch_of_rank()).loss
    loss.backward()
    return sum(saved.values()), [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def compare(mesh: Mesh, make: Callable[[], Any], prepare: Callable[[Any], Any], **options: Any) -> list[float]:
    """Bytes saved on each rank, as a part of those without recomputation; values are equal to the bit."""
    ranks = comm.threads.run(mesh, lambda: (step(make, lambda model: None, **options), step(make, prepare, **options)))
    for (_, plain), (_, again) in ranks:
        assert len(plain) > 10 and all(map(torch.equal, again, plain))
    return [fewer / saved for (saved, _), (fewer, _) in ranks]


def test_attention_at_tp_2_with_dropout() -> None:
    parts = compare(Mesh(2, tp=2), llama, lambda model: checkpoint_layers(model, "attention"))
    assert max(parts) < 0.7

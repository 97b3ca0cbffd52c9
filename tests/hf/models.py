"""Tiny Hugging Face models, and what one process computes with them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from neuronx_dist import comm
from neuronx_dist.hf import load_pretrained, swap
from neuronx_dist.spmd import spec_of
from tests.support.llama import tiny_llama

VOCAB, BATCH, SEQ = 96, 2, 8
SIZES = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)


def llama_config(
    heads: int = 4, kv_heads: int = 2, head_dim: int = 8, tied: bool = False, layers: int = 2, **more: Any
) -> LlamaConfig:
    return tiny_llama(
        hidden_size=heads * head_dim,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=tied,
        use_cache=False,
        initializer_range=0.2,
        **more,
    )


def reference_model(config: Any, model_class: Any = LlamaForCausalLM, dtype: torch.dtype = torch.float64) -> Any:
    """A model of one process, with norms and biases that are not at their trivial initial values."""
    torch.manual_seed(0)
    model = model_class(copy.deepcopy(config)).to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim == 1:
                param.add_(torch.randn_like(param) * 0.1)
    return model


def batch(seed: int = 0, batch_size: int = BATCH, seq: int = SEQ) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and labels some of which are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch_size, seq), generator=generator)
    labels = ids.clone()
    labels[0, :3] = -100
    labels[-1, -1] = -100
    return ids, labels


def reference_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def run_reference(
    model: Any, ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, logits and gradients of one process; the loss in the dtype of the logits (Hugging Face's own is in
    float32).
    """
    model.zero_grad()
    logits = model(input_ids=ids).logits
    loss = reference_loss(logits, labels)
    loss.backward()
    return loss.detach(), logits.detach(), {name: param.grad.clone() for name, param in model.named_parameters()}


def meta_model(config: Any, model_class: Any = LlamaForCausalLM, dtype: torch.dtype = torch.float64) -> Any:
    with torch.device("meta"):
        return model_class(copy.deepcopy(config)).to(dtype)


def swapped(config: Any, state: dict[str, torch.Tensor], model_class: Any = LlamaForCausalLM, **options: Any) -> Any:
    dtype = next(iter(state.values())).dtype
    return load_pretrained(swap(meta_model(config, model_class, dtype), **options), state)


def sum_partial_gradients(model: nn.Module) -> None:
    """Sums gradients over tp as `grads.reduce_gradients` does, written out: these tests do not use that module."""
    for param in model.parameters():
        if spec_of(param).sequence_parallel and param.grad is not None:
            param.grad = comm.all_reduce(param.grad, "tp")


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||a - b|| / ||b||, and ||a|| where b is zero."""
    scale = expected.norm().item()
    return (actual - expected).norm().item() / (scale or 1.0)


class Stage:
    """A pipeline model as the weights see it: the whole model, of which one stage is here, by its original names."""

    def __init__(self, model: Any) -> None:
        self.original_module = model
        last = model.config.num_hidden_layers - 1
        self.mine = (
            ("model.embed_tokens", "model.rotary_emb", "model.layers.0."),
            (f"model.layers.{last}.", "model.norm", "lm_head"),
        )

    partitioned = tied_weights_synced = True

    def is_local(self, name: str) -> bool:
        return f"{name}.".startswith(self.mine[comm.rank("pp")])

    def local_named_modules(self) -> Any:
        return ((name, module) for name, module in self.original_module.named_modules() if self.is_local(name))

    def local_named_parameters(self) -> Any:
        return ((name, param) for name, param in self.original_module.named_parameters() if self.is_local(name))

    def tied_groups(self) -> Any:
        return []

"""Hugging Face models, swapped, are ok at level G; and the four bugs that types are for, each put into a real layer."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
import transformers

import neuronx_dist as nxd
from neuronx_dist import hf, spmd
from neuronx_dist.gradients import buckets
from neuronx_dist.parallel_layers import embedding, linear_cross_entropy, loss_functions
from tests.support.paths import declared_in, file_name

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank_of_a_kind_is_confirmed")]

FULL = os.environ.get("NXD_FULL") == "1"
SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, use_cache=False, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama, one head per rank, biases": ("Llama", dict(num_attention_heads=2, attention_bias=True, mlp_bias=True)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mistral, sliding window": ("Mistral", dict(sliding_window=4)),
    "qwen2": ("Qwen2", {}),  # biases of q, k and v
    "qwen3": ("Qwen3", dict(head_dim=8)),  # norms of q and k
    "starcoder2": ("Starcoder2", {}),  # plain MLP, LayerNorm, biases everywhere
    "granite": ("Granite", dict(attention_multiplier=0.5, residual_multiplier=0.5)),
    "smollm3": ("SmolLM3", {}),
    "cohere": ("Cohere", {}),  # attention and MLP beside each other
    "helium": ("Helium", dict(head_dim=8)),
}
# Attention, mask of padding, checkpointing (of the reentrant kind: True), dtype: each with something of the other two.
DATA = {"tp": 2, "dp": 2}
PIPELINE = {"pp": 2, "tp": 2}
RUNS: list[tuple[dict[str, int], dict[str, Any]]] = [
    (DATA, dict(implementation="sdpa")),
    (DATA, dict(implementation="eager", mask=True, checkpointing=True, dtype=torch.bfloat16)),
    (DATA, dict(implementation="sdpa", mask=True, checkpointing=False, sequence_parallel=True)),
    (PIPELINE, dict(implementation="sdpa", checkpointing=True)),
    (PIPELINE, dict(implementation="eager", mask=True, sequence_parallel=True)),
]
# Llama in all runs, each other model in one of them in turn; with NXD_FULL=1 in more.
CASES = [
    (name, mesh, options)
    for index, name in enumerate(MODELS)
    for number, (mesh, options) in enumerate(RUNS)
    if name == "llama"
    or number == index % len(RUNS)
    or (FULL and (name == "qwen3" or number in ((1, 4) if index % 2 else (2, 3))))
]
HOLES = tuple(file_name(module) for module in (embedding, linear_cross_entropy, loss_functions, buckets))


def model_fn(
    name: str,
    implementation: str = "sdpa",
    checkpointing: bool | None = None,
    dtype: torch.dtype = torch.float32,
    sequence_parallel: bool = False,
    pipeline: bool = False,
    mask: bool = False,
) -> Any:
    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(dtype)
    hf.swap(module, sequence_parallel=sequence_parallel)
    module.train()
    if checkpointing is not None:
        module.gradient_checkpointing_enable(dict(use_reentrant=checkpointing))
    if not pipeline:
        return module
    return nxd.NxDPPModel(
        module,
        transformer_layer_cls=hf.transformer_layer_class(module),
        num_microbatches=2,
        input_names=["input_ids", "labels", "num_items_in_batch", *(["attention_mask"] if mask else [])],
        output_loss_value_spec={"loss": True, "logits": False},
        auto_partition=True,
        broadcast_and_average_loss=True,
    )


def inputs(mask: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.zeros(4, 8, dtype=torch.long)
    found = dict(input_ids=ids, labels=ids, num_items_in_batch=torch.ones(()))
    return {**found, "attention_mask": torch.ones(4, 8, dtype=torch.long)} if mask else found


@pytest.mark.one_in(2)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("name", "mesh", "options"), CASES, ids=str)
def test_a_swapped_model_is_ok(name, mesh, options):
    options = dict(options, name=name, pipeline=mesh is PIPELINE)
    report = spmd.check(model_fn, inputs(options.get("mask", False)), mesh, options=options)
    assert report.ok, str(report)
    lines = [*report.trusted, *report.assumed]
    assert all(declared_in(line)[0] in HOLES for line in lines), lines  # nothing of the model


# --- "Have you ever ..." (the quick start's four reasons) ------------------------------------------------------------


def llama(change: Any, sequence_parallel: bool = False) -> Any:
    module = model_fn("llama", sequence_parallel=sequence_parallel)
    change(module.model.layers[1])
    return module


def found(change: Any, mesh: dict[str, int], **options: Any) -> str:
    """The message, which names a module of layer 1 and a line."""
    report = spmd.check(functools.partial(llama, change, **options), inputs(), mesh)
    assert not report.ok and report.problems[0].kind == "types", str(report)
    message = report.problems[0].message
    assert "layers.1" in message and ".py:" in message, message
    return message


def test_a_forgotten_copy_to_tensor_parallel_region():
    """up_proj used as a plain weight: its input is I, and nobody would add up the input's gradients."""

    def change(layer: Any) -> None:
        layer.mlp.forward = lambda x: layer.mlp.down_proj(torch.nn.functional.linear(x, layer.mlp.up_proj.weight))

    message = found(change, {"tp": 2})
    assert "mlp" in message and "I" in message and 'spmd.convert(x, "tp", src=spmd.I, dst=spmd.R)' in message, message


def test_an_all_reduce_too_many():
    def change(layer: Any) -> None:
        forward = layer.mlp.down_proj.forward
        layer.mlp.down_proj.forward = lambda x: spmd.all_reduce(forward(x), "tp", src=spmd.P, dst=spmd.I)

    message = found(change, {"tp": 2})
    assert "all_reduce" in message and "the same on all ranks, not P" in message and "mlp.down_proj" in message, message


def test_a_nonlinear_function_of_a_pending_sum():
    """The row layer's sum is left out, and the norm of the next layer would be of one rank's part."""

    def change(layer: Any) -> None:
        layer.mlp.down_proj.reduce_output = False
        mlp = layer.mlp.forward
        layer.mlp.forward = lambda x: torch.tanh(mlp(x))

    message = found(change, {"tp": 2})
    assert "tanh" in message and "not linear" in message, message
    assert "P on tp since contraction over a sharded dim in linear" in message and "mlp.down_proj" in message, message


def test_what_only_numbers_on_many_ranks_would_show_otherwise():
    """Norms under sequence parallelism whose gradients nobody adds up: found in one process, at dp 2, cp 1 and tp 2."""

    def change(layer: Any) -> None:
        layer.input_layernorm.weight.sequence_parallel_enabled = False

    message = found(change, {"dp": 2, "tp": 2}, sequence_parallel=True)
    assert "layers.1.input_layernorm" in message and "tp" in message, message

"""Swapped models of 45 architectures compute what one process does: loss, logits and all gradients, in float64.

`make test` runs one of each sort of word and of table; NXD_FULL=1 runs all, at tp 2 and 4, with sequence parallelism.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.distributed import DistributedConfig

from neuronx_dist import comm, hf
from neuronx_dist.hf import UnsupportedModelError, in_place, words
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.lora import LoraConfig, get_lora_model
from neuronx_dist.spmd.random import manual_seed
from neuronx_dist.weights.shard_spec import ShardSpec, spec_of
from tests.hf.measuring import COLUMNS, measure
from tests.hf.parity import differences
from tests.support.architectures import HEADS, HIDDEN, MEASURED, VOCAB, Architecture, padded
from tests.support.more_architectures import OF_TRANSFORMERS

FULL = os.environ.get("NXD_FULL") == "1"
TOLERANCE = 1e-10
pytestmark = pytest.mark.slow

# One of each sort: gathered outputs and split inputs, packed, Conv1D, biases by head (ALiBi, T5's), experts (with a
# bias, shared, and latent attention), scaled and tied embeddings, encoders, decoders with another input, classes.
SAMPLE = (
    "Phi 3", "GLM", "GPT-2", "BLOOM", "Falcon (ALiBi)", "T5", "Mixtral", "gpt-oss", "DeepSeek V2", "Gemma 3", "OLMo 2",
    "BERT (masked language model)", "BART", "Llama (classification)", "OPT",
)  # fmt: skip
NO_SEQUENCES = {
    "T5": "has 2 lists of layers: encoder.block, decoder.block",
    "BART": "has 2 lists of layers: model.encoder.layers, model.decoder.layers",
    "Whisper": "has 2 lists of layers: model.encoder.layers, model.decoder.layers",
    "ALBERT": "calls the layers of albert.encoder.albert_layer_groups 2 times",
}
BY_NAME = {each.name: each for each in OF_TRANSFORMERS}
CHOSEN = [each for each in OF_TRANSFORMERS if FULL or each.name in SAMPLE]


def two_layers(architecture: Architecture) -> Any:
    return architecture.make(2 * len(architecture.layers))


def wrong(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not value < TOLERANCE}


@pytest.mark.parametrize("tp", [2, 4] if FULL else [2])
@pytest.mark.parametrize("architecture", CHOSEN, ids=lambda each: each.name)
def test_loss_logits_and_gradients_are_those_of_one_process(architecture: Architecture, tp: int) -> None:
    assert wrong(differences(two_layers(architecture), architecture.inputs(), tp)) == {}


def test_gpt_neo_with_local_attention_in_each_second_layer() -> None:
    """Global attention, and local attention of a window."""
    width = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_heads": HEADS, "max_position_embeddings": 16}
    dropout = dict.fromkeys(("embed_dropout", "resid_dropout", "attention_dropout"), 0.0)
    config = {**width, **dropout, "window_size": 4, "attention_types": [[["global", "local"], 1]]}
    neo = Architecture("GPT-Neo", "GPTNeoForCausalLM", ("GPTNeoBlock",), config, ("num_layers",), padded)
    assert wrong(differences(two_layers(neo), neo.inputs(), 2)) == {}
    assert wrong(differences(two_layers(neo), neo.inputs(), 4)) == {}
    assert wrong(differences(two_layers(neo), neo.inputs(), 2, sequence_parallel=True)) == {}


@pytest.mark.parametrize("architecture", CHOSEN, ids=lambda each: each.name)
def test_with_sequence_parallelism(architecture: Architecture) -> None:
    if architecture.name == "ViT":  # one patch and the class: two tokens
        architecture = replace(architecture, config={**architecture.config, "patch_size": 8})
    model, inputs = two_layers(architecture), architecture.inputs()
    if architecture.name not in NO_SEQUENCES:
        assert wrong(differences(model, inputs, 2, sequence_parallel=True)) == {}
        return
    with pytest.raises(UnsupportedModelError, match=f"{NO_SEQUENCES[architecture.name]}: swap it without"):
        differences(model, inputs, 2, sequence_parallel=True)


@pytest.mark.parametrize(
    "architecture", [each for each in CHOSEN if FULL or each.name == "GPT-2"], ids=lambda each: each.name
)
def test_the_document_says_what_is_measured(architecture: Architecture) -> None:
    """`tests/hf/measured.json`, of which `docs/models.md` is made; `python -m tests.hf.measuring` writes it."""
    measured = json.loads(MEASURED.read_text())
    assert list(measured) == [each.name for each in OF_TRANSFORMERS]
    assert {column: measure(architecture, column) for column in COLUMNS} == measured[architecture.name]
    assert sum(row["swap"] == "yes" for row in measured.values()) >= 40


def test_a_scaled_embedding_where_modules_are_made_on_meta() -> None:
    """A check calls a function that makes and swaps a model in this way."""
    with comm.as_rank(Mesh(2, tp=2), 0), torch.device("meta"):
        hf.swap(two_layers(BY_NAME["Gemma"]))


# --- plans that are passed


def test_a_distributed_config_is_a_layout_and_changes_words_of_the_plan() -> None:
    config = DistributedConfig(tp_size=2, pp_size=1, tp_plan={"model.layers.*.mlp.down_proj": "rowwise"})
    swapped_by(config, "Llama")
    gathered = {f"model.layers.*.mlp.{name}_proj": "colwise_gather_output" for name in ("gate", "up")}
    whole = DistributedConfig(tp_size=2, tp_plan={**gathered, "model.layers.*.mlp.down_proj": "rowwise_split_input"})
    swapped_by(whole, "Llama")


@pytest.mark.parametrize(
    "config, message",
    [
        (DistributedConfig(tp_size=4), "tp_size=4 of the DistributedConfig, but the mesh has tp=2"),
        (DistributedConfig(tp_size=2, pp_size=2), "pp_size=2 of the DistributedConfig, but the mesh has pp=1"),
        (DistributedConfig(tp_size=2, ep_size=2), "ep_size=2 of the DistributedConfig distributes whole experts"),
        (
            DistributedConfig(tp_size=2, tp_plan={"model.layers.*.mlp.up": "colwise"}),
            "the model has no such layer; nearest: model.layers.*.mlp",
        ),
        (
            DistributedConfig(tp_size=2, tp_plan={"lm_head": "columnwise"}),
            "style 'columnwise' (nearest: colwise",
        ),
    ],
)
def test_a_distributed_config_that_does_not_fit_is_refused(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        swapped_by(config, "Llama")


def swapped_by(plan: Any, name: str) -> None:
    assert wrong(differences(two_layers(BY_NAME[name]), BY_NAME[name].inputs(), 2, plan=plan)) == {}


def test_a_plan_of_the_user_says_of_each_matrix_what_becomes_of_it() -> None:
    plan = {
        **{f"transformer.h.*.attn.{name}": "replicate" for name in ("c_attn", "c_proj")},
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    }
    with pytest.raises(UnsupportedModelError, match=re.escape("transformer.wpe (not in the plan)")):
        swapped_by(plan, "GPT-2")
    swapped_by({**plan, "transformer.wpe": "embedding_colwise"}, "GPT-2")


# --- dropout


@pytest.mark.parametrize(
    "name, rates, first",
    [
        ("BERT (masked language model)", ("attention_probs_dropout_prob", "hidden_dropout_prob"), "self"),
        ("BERT (masked language model)", ("attention_probs_dropout_prob",), "self"),
        ("BLOOM", ("attention_dropout", "hidden_dropout"), "query_key_value"),
        ("BLOOM", ("hidden_dropout",), ""),
        ("GPT-2", ("resid_pdrop", "attn_pdrop"), "c_attn"),
        ("GPT-2 with adapters", ("resid_pdrop", "attn_pdrop"), "c_attn"),
        pytest.param("GPT-2 with derived plan", ("resid_pdrop", "attn_pdrop"), "c_attn", marks=pytest.mark.slow),
    ],
)
def test_dropout_of_heads_has_random_numbers_of_its_own(name: str, rates: tuple[str, ...], first: str) -> None:
    """From the columns to the row layer, or, where that is in another module, in the attention; a residual's agree."""
    name, _, more = name.partition(" with ")
    architecture = replace(BY_NAME[name], config={**BY_NAME[name].config, **dict.fromkeys(rates, 0.5)})

    def rank() -> Any:
        model = hf.swap(two_layers(architecture), plan=None if more != "derived plan" else "derived")
        if more == "adapters":
            get_lora_model(model, LoraConfig(target_modules=["c_attn", "c_proj"]))
        manual_seed(3)
        normed = _normed(model)
        loss, number = model.train()(**architecture.inputs()).loss.detach(), torch.rand(1)
        local = {path.rpartition(".")[2] for path, module in model.named_modules() if "forward" in vars(module)}
        local |= {path.rpartition(".")[2] for path, module in model.named_modules() if _enters(module)}
        residuals = [number, *normed]
        return residuals, local - {"c_fc", "lm_head"}, loss - model.eval()(**architecture.inputs()).loss.detach()

    (residuals, local, change), (others, _, _) = comm.threads.run(Mesh(2, tp=2), rank)
    assert local == ({first} if first else set()) and abs(change) > 1e-6
    assert len(residuals) > 4 and all(map(torch.allclose, residuals, others))


def _normed(model: torch.nn.Module) -> list[torch.Tensor]:
    """Returns a list of what norms of residuals get, which grows while the model runs."""
    seen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith("Norm"):
            module.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    return seen


def _enters(module: torch.nn.Module) -> bool:
    functions = [getattr(hook, "func", hook) for hook in module._forward_hooks.values()]
    return any(function.__name__ == "_enter_local_stream" for function in functions)


@pytest.mark.parametrize(
    "name, rates, row",
    [
        ("BART", dict(activation_dropout=0.5, dropout=0.5), "fc2"),
        ("T5", dict(dropout_rate=0.5, feed_forward_proj="gelu"), "DenseReluDense.wo"),
    ],
)
def test_dropout_of_local_features_differs_over_tp_and_that_of_residuals_does_not(
    name: str, rates: dict[str, float], row: str
) -> None:
    architecture = replace(BY_NAME[name], config={**BY_NAME[name].config, **rates})

    def rank() -> Any:
        model = hf.swap(two_layers(architecture)).train()
        manual_seed(3)
        dropped: list[torch.Tensor] = []
        for path, module in model.named_modules():
            if path.endswith(row):
                module.register_forward_pre_hook(lambda module, args: dropped.append(args[0] == 0))
        residuals = _normed(model)
        model(**architecture.inputs())
        return dropped, [torch.rand(1), *residuals]

    (masks, residuals), (other_masks, others) = comm.threads.run(Mesh(2, tp=2), rank)
    assert len(residuals) > 4 and all(map(torch.allclose, residuals, others))
    assert len(masks) >= 4 and not any(map(torch.equal, masks, other_masks))


# --- what the comparison notices --------------------------------------------------------------------------------------


def test_a_packed_matrix_that_is_cut_without_its_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(words.LAYER_STYLES, "packed_column", ("column", {}))
    glm = BY_NAME["GLM"]
    assert "loss" in wrong(differences(two_layers(glm), glm.inputs(), 2))


def test_experts_that_are_cut_without_their_blocks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpacked(axis: Any, dim: int, stride: int, *rest: Any, **options: Any) -> ShardSpec:
        return ShardSpec(axis, dim, 1, *rest, **options)

    monkeypatch.setattr(in_place, "ShardSpec", unpacked)
    mixtral = BY_NAME["Mixtral"]
    assert "loss" in wrong(differences(two_layers(mixtral), mixtral.inputs(), 2))


@pytest.mark.parametrize(
    "name, style", [("Mixtral", "experts"), ("DeepSeek V2", "latent"), ("BLOOM", "local_heads"), ("gpt-oss", "experts")]
)
def test_a_word_that_is_dropped_is_noticed(name: str, style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(in_place.IN_PLACE, style, lambda module, config: None)
    try:
        assert wrong(differences(two_layers(BY_NAME[name]), BY_NAME[name].inputs(), 2)) != {}
    except RuntimeError as error:  # of shapes that do not fit
        assert "size" in str(error) or "shape" in str(error)


def test_weights_are_sharded_and_come_back(tmp_path: Any) -> None:
    """Nothing that the plan names stays whole; loading and saving have transformers' names and shapes."""
    for name in ("GPT-2", "Mixtral", "gpt-oss", "T5"):
        whole = two_layers(BY_NAME[name])
        state = {key: value.clone() for key, value in whole.state_dict().items()}

        def rank(whole: Any = whole, state: Any = state) -> tuple[float, dict[str, torch.Tensor]]:
            with torch.device("meta"):
                model = type(whole)(whole.config).double()
            hf.load_pretrained(hf.swap(model), state)
            sharded = sum(p.numel() for p in model.parameters() if spec_of(p).is_sharded)
            return sharded / sum(p.numel() for p in model.parameters()), hf.full_state_dict(model)

        for share, full in comm.threads.run(Mesh(2, tp=2), rank):
            assert share > 0.7
            assert all(torch.equal(value, state[key]) for key, value in full.items())

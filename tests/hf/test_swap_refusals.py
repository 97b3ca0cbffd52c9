"""Refusals of a swap, and their messages: models that it has no plan for, and sizes that tp does not divide."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, CTRLConfig

from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import UnsupportedModelError, swap
from neuronx_dist.hf.plan_reading import read_plan
from neuronx_dist.mesh import Mesh
from neuronx_dist.planning.plan import Plan
from tests.hf.models import SIZES, VOCAB, llama_config, meta_model


def _refusal(build: Any, tp: int = 2, kind: Any = UnsupportedModelError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        threads.run(Mesh(tp, tp=tp), lambda: swap(build(), **options))
    return str(caught.value)


def _from_config(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_model_without_a_plan_is_refused() -> None:
    config = CTRLConfig(n_layer=2, n_embd=32, n_head=4, vocab_size=VOCAB)
    message = _refusal(lambda: _from_config(config))
    assert "CTRLLMHeadModel (model type 'ctrl') has no tensor-parallel plan" in message
    assert "transformer.h.*.multi_head_attention.Wq" in message
    for way in ("pipelines (NxDPPModel) and data parallelism", "neuronx_dist.parallelize shards any module", "plan={"):
        assert way in message


def test_a_given_plan_that_does_not_fit_is_refused() -> None:
    def refusal(plan: Any) -> str:
        return _refusal(lambda: meta_model(llama_config()), kind=ValueError, plan=plan)

    assert "the plan has the entry 'lm_head': None; it takes names of layers and words" in refusal({"lm_head": None})
    words = {"model.layers.*.mlp.up_proj": "colwise"}
    assert '"replicate" of one that stays whole' in refusal(words)
    assert "does not cover " in refusal(words) and "model.layers.*.mlp.down_proj" in refusal(words)
    assert (
        "names model.layer.*.mlp.up_proj, but the model has no such layer; nearest: model.layers.*.mlp.up_proj"
        in refusal({"model.layer.*.mlp.up_proj": "colwise"})
    )
    assert "for each: 'model.layers.*.mlp.gate_proj', 'model.layers.*.mlp.up_proj'" in refusal(
        {"model.layers.*.mlp.(gate_proj|up_proj)": "colwise"}
    )
    unknown = "the plan gives model.layers.*.mlp.up_proj the unknown style 'column' (nearest: colwise, "
    assert unknown in refusal({"model.layers.*.mlp.up_proj": "column"})
    layers = read_plan(meta_model(llama_config())).layers(meta_model(llama_config()), 2)
    assert "the plan must shard lm_head" in refusal(layers[:-1])
    assert "has no layers to replace" in refusal(Plan())
    assert "has no layers to replace" in refusal(["model.layers.0"])


def test_layers_outside_the_plan_are_named() -> None:
    def build() -> Any:
        model = meta_model(llama_config())
        model.model.layers[0].mlp.extra = torch.nn.Linear(4, 4, device="meta")
        model.model.layers[1].self_attn.strange_norm = torch.nn.LayerNorm(4, device="meta")
        return model

    message = _refusal(build)
    assert "model.layers.*.mlp.extra (not in the plan)" in message
    assert "model.layers.*.self_attn.strange_norm (not in the plan)" in message
    assert "q_proj" not in message


@pytest.mark.parametrize("word", ["grouped_gemm", "ep_dispatch_experts"])
def test_words_of_an_expert_axis_are_refused(word: str) -> None:
    message = _refusal(lambda: meta_model(llama_config()), kind=ValueError, plan={"model.layers.*.mlp": word})
    assert f"the plan gives model.layers.*.mlp the style {word!r}: it distributes whole experts" in message
    assert "over tp the word is 'moe_tp_experts'" in message


def test_not_a_model_of_transformers() -> None:
    assert 'hf.swap(model, plan="derived", inputs={...}) finds a plan' in _refusal(lambda: torch.nn.Linear(2, 2))


def test_heads_that_tp_does_not_divide() -> None:
    message = _refusal(lambda: meta_model(llama_config(9, 3)), kind=ValueError)
    assert "9 attention heads over 3 key/value heads are not divisible by tp=2" in message
    assert "pad_heads=True, or choose tp from [1, 3, 9]" in message


def test_sizes_that_tp_does_not_divide() -> None:
    message = _refusal(lambda: meta_model(llama_config(5, 5)), tp=5, kind=ValueError)
    assert "the vocabulary of 96 is not divisible by tp=5: pass pad_vocab=True, which adds 4 zero rows" in message
    assert "gate_proj of size 48 is not divisible by tp=5" in message


def test_swapping_twice_is_refused() -> None:
    assert "already swapped" in _refusal(lambda: swap(meta_model(llama_config())), kind=ValueError)
    message = _refusal(
        lambda: torch.nn.Sequential(swap(meta_model(llama_config()))),
        kind=ValueError,
        plan="derived",
        inputs={"input": torch.zeros(2, 4, dtype=torch.long)},
    )
    assert "0 of this Sequential is already swapped" in message


def test_unknown_options_are_refused_with_the_nearest_name() -> None:
    message = _refusal(lambda: torch.nn.Linear(2, 2), kind=TypeError, sequence_paralel=True)
    assert message.startswith("swap has no option 'sequence_paralel'; nearest: sequence_parallel")


def test_example_arguments_that_are_no_dict_are_refused() -> None:
    message = _refusal(lambda: torch.nn.Linear(2, 2), kind=TypeError, plan="derived", inputs=torch.zeros(3, 2))
    assert 'of Linear in a dict by name, such as inputs={"input": tensor}; got Tensor[3, 2]' in message


def test_sequence_parallelism_without_one_list_of_layers_is_refused() -> None:
    def two_lists() -> Any:
        model = meta_model(llama_config())
        model.model.more = copy.deepcopy(model.model.layers)
        model._tp_plan = {name.replace("layers", part): word for name, word in model.tp_plan.items() for part in LISTS}
        return model

    def called_again() -> Any:
        model = meta_model(llama_config())
        model.config.num_hidden_layers = 4
        return model

    reason = _refusal(two_lists, sequence_parallel=True)
    assert "LlamaForCausalLM has 2 lists of layers: model.layers, model.more: swap it without" in reason
    assert "calls the layers of model.layers 4 times" in _refusal(called_again, sequence_parallel=True)


LISTS = ("layers", "more")


def test_dropouts_that_the_swap_cannot_tell_apart_are_refused() -> None:
    from transformers import Starcoder2Config

    dropout = dict(residual_dropout=0.1, embedding_dropout=0.0, attention_dropout=0.0)

    def build() -> Any:
        return _from_config(Starcoder2Config(**SIZES, num_hidden_layers=1, **dropout))

    threads.run(Mesh(2, tp=2), lambda: swap(build()))
    assert "residual_dropout=0.1: such dropout" in _refusal(build, sequence_parallel=True)


def test_dropouts_that_older_configs_call_pdrop_are_refused_too() -> None:
    message = _refusal(lambda: meta_model(llama_config(resid_pdrop=0.1)), sequence_parallel=True)
    assert "resid_pdrop=0.1: such dropout" in message


def _of_class(name: str, **sizes: Any) -> Any:
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**sizes))


def test_falcons_key_value_heads_are_checked() -> None:
    sizes = dict(hidden_size=32, num_attention_heads=8, num_kv_heads=2, num_hidden_layers=1, vocab_size=VOCAB)
    message = _refusal(
        lambda: _of_class("FalconForCausalLM", **sizes, new_decoder_architecture=True), tp=4, kind=ValueError
    )
    assert "tp=4 replicates k_proj, v_proj and pads" in message and "has other layers" in message


TINY = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32, max_position_embeddings=8)


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("DistilBertForMaskedLM", dict(dim=16, n_heads=2, n_layers=1, hidden_dim=32)),
        ("BioGptForCausalLM", TINY),
        ("M2M100ForConditionalGeneration", dict(d_model=16, encoder_layers=1, decoder_layers=1)),
        ("CLIPTextModel", TINY),
        ("CLIPVisionModel", TINY),
        ("SiglipTextModel", TINY),
        ("SiglipVisionModel", TINY),
    ],
)
def test_models_with_default_dropout_and_towers_are_swapped(name: str, sizes: Any) -> None:
    threads.run(Mesh(2, tp=2), lambda: swap(_of_class(name, **sizes), pad_vocab=True))


@pytest.mark.parametrize("tp", [1, 2])
def test_forward_before_there_are_values_is_refused(tp: int) -> None:
    def rank() -> None:
        model, ids = swap(meta_model(llama_config())), torch.zeros(1, 4, dtype=torch.long)
        with pytest.raises(RuntimeError, match=r"LlamaForCausalLM was swapped on the meta device.*load_pretrained"):
            model(input_ids=ids, labels=ids)

    threads.run(Mesh(tp, tp=tp), rank)

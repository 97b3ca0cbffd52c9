"""Plans of each layer, in whole: plans of a model as a file, and every reason to refuse one.

`plans.txt` has the plans as they were reviewed; NXD_UPDATE_PLANS=1 writes it anew. That they are right, parity shows
(test_swap.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist.hf.model_plan import UnsupportedModelError, transformer_layer_class
from neuronx_dist.hf.plan_reading import _pattern as pattern_of
from neuronx_dist.hf.plan_reading import _words as words_of_model
from neuronx_dist.hf.plan_reading import read_plan, words_of
from tests.hf.toy import Attention, Layer, Toy
from tests.support.more_architectures import OF_TRANSFORMERS

FILE = Path(__file__).parent / "plans.txt"
META = torch.device("meta")


def _plans() -> Iterator[str]:
    gated = Toy(4, 2, 1)
    with META:
        gated.model.layers[0].mlp.gate_proj = nn.Linear(8, 12)
        gated.model.layers[0].self_attn.q_norm = nn.LayerNorm(2)
    gated.tp_plan |= {"model.layers.*.mlp.gate_proj": "colwise", "lm_head": "colwise_rep"}
    gated.tp_plan["model.layers.*.self_attn.q_norm"] = "replicated_with_grad_allreduce"
    unlike_biases = Toy(4, 2, 1)
    unlike_biases.model.layers[0].self_attn.k_proj = nn.Linear(8, 4, device=META)
    without_a_plan = Toy(4, 2, 1, model_type="stablelm")
    without_a_plan.tp_plan = None  # type: ignore[assignment]
    with META:
        without_a_plan.model.layers[0].mlp.gate_proj = nn.Linear(8, 12)
    cases: list[tuple[str, Any, list[int], dict[str, Any]]] = [
        ("two layers", Toy(4, 2, 2), [1, 2], {}),
        ("sequence parallel", Toy(4, 2, 1), [2], dict(sequence_parallel=True)),
        ("heads that need padding", Toy(9, 3, 1), [2, 6], {}),
        ("replicated heads, groups that grow", Toy(6, 2, 1), [4], {}),
        ("siblings of the MLP, a norm of local heads", gated, [2], {}),
        ("unlike biases", unlike_biases, [2], {}),
        ("a plan of ours", without_a_plan, [2], {}),
    ]
    for label, model, degrees, options in cases:
        plan = read_plan(model)
        yield f"# {label}: {plan.heads} over {plan.kv_heads}, regions {', '.join(plan.regions)}"
        for tp in degrees:
            yield from (f"tp={tp} {layer}" for layer in plan.layers(model, tp, **options))


def test_plans_are_as_reviewed() -> None:
    now = [*_plans()]
    if os.environ.get("NXD_UPDATE_PLANS"):
        FILE.write_text("\n".join(now) + "\n")
    assert now == FILE.read_text().splitlines()


# --- refusals


class OtherLinear(nn.Linear):
    pass


class OtherEmbedding(nn.Embedding):
    pass


def _with(change: Callable[[Any], Any]) -> Toy:
    model = Toy(4, 2, 2)
    with META:
        change(model)
    return model


def _set(path: str, module: Any) -> Callable[[Any], Any]:
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, module())


COVERED = "Toy (model type 'toy') cannot be swapped: its plan does not cover "
REFUSALS: list[tuple[str, Callable[[Any], Any], str]] = [
    (
        "no config",
        lambda m: setattr(m, "config", None),
        "Toy (model type 'unknown') is not a Hugging Face model, whose config a plan of words needs: hf.swap(model, "
        'plan="derived", inputs={...}) finds a plan in its forward, parallel_layers.replace.apply(model, layer_plans) '
        "replaces layers by name, and neuronx_dist.parallelize divides any module",
    ),
    (
        "no plan",
        lambda m: setattr(m, "tp_plan", {}),
        "Toy (model type 'toy') has no tensor-parallel plan in transformers (its config's base_model_tp_plan); these "
        "layers would stay unsharded: model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj, "
        "model.layers.*.self_attn.v_proj, model.layers.*.self_attn.o_proj, model.layers.*.mlp.up_proj, "
        "model.layers.*.mlp.down_proj",
    ),
    (
        "a style",
        lambda m: m.tp_plan.update({"model.layers.*.mlp.up_proj": "packed"}),
        COVERED + "model.layers.*.mlp.up_proj (style 'packed')",
    ),
    (
        "a layer of another class",
        _set("model.layers.1.mlp.up_proj", lambda: OtherLinear(8, 12)),
        COVERED + "model.layers.*.mlp.up_proj (a OtherLinear, not a torch.nn.Linear)",
    ),
    (
        "a head of another style",
        lambda m: m.tp_plan.update({"lm_head": "rowwise"}),
        COVERED + "lm_head (style 'rowwise': that of the head is one of colwise, colwise_gather_output, colwise_rep, "
        "sequence_parallel, local_params, replicate)",
    ),
    (
        "a norm between sharded layers, and below",
        lambda m: (
            setattr(m.model.layers[1].self_attn, "norm", nn.Sequential(nn.LayerNorm(4))),
            setattr(m.model.layers[0].mlp, "norm", nn.LayerNorm(12)),
        ),
        COVERED + "model.layers.*.mlp.norm (not in the plan), model.layers.*.self_attn.norm.* (not in the plan)",
    ),
    (
        "no heads",
        lambda m: setattr(m.config, "num_attention_heads", None) or setattr(m.config, "num_key_value_heads", None),
        "Toy (model type 'toy'): its config has no num_attention_heads",
    ),
]


@pytest.mark.parametrize("change, message", [case[1:] for case in REFUSALS], ids=[case[0] for case in REFUSALS])
def test_models_that_are_refused(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        read_plan(_with(change))
    assert str(error.value).startswith(message)
    if message.startswith(COVERED) or "whole" in message:
        assert str(error.value).startswith(f"{message}. Without swap, pipelines (NxDPPModel)")


@pytest.mark.parametrize(
    "change",
    [
        _set("model.other_norm", lambda: nn.LayerNorm(8)),  # outside of regions all is equal on all ranks
        _set("model.projection", lambda: nn.Linear(8, 8)),
        lambda m: setattr(m, "table", nn.Parameter(torch.ones(2, 2))),
        _set("model.layers.0.self_attention_norm", lambda: nn.LayerNorm(8)),  # the name alone begins like a region's
        _set("model.layers.0.mlp.act", lambda: nn.ReLU()),
        _set("model.layers.0.mlp.norm", lambda: nn.LayerNorm(12, elementwise_affine=False)),
        lambda m: m.tp_plan.update({"lm_head": "colwise_gather_output"}),
        lambda m: m.tp_plan.update({"lm_head": "colwise"}),
    ],
)
def test_models_that_are_not(change: Callable[[Any], Any]) -> None:
    assert read_plan(_with(change)).styles == read_plan(Toy(4, 2, 2)).styles


@pytest.mark.parametrize(
    "change, embedding, head",
    [
        (lambda m: setattr(m, "get_output_embeddings", lambda: None), "model.embed_tokens", ""),
        (lambda m: setattr(m, "get_input_embeddings", lambda: None), "", "lm_head"),
        (lambda m: setattr(m, "get_input_embeddings", None), "", "lm_head"),
        (_set("model.embed_tokens", lambda: OtherEmbedding(20, 8)), "", "lm_head"),
        (_set("lm_head", lambda: OtherLinear(8, 20)), "model.embed_tokens", ""),
        (lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight), "model.embed_tokens", "lm_head"),
    ],
)
def test_ends_that_stay_whole(change: Callable[[Any], Any], embedding: str, head: str) -> None:
    """An embedding or a head that is missing, or of a class that may compute more."""
    plan = read_plan(_with(change))
    assert (plan.embedding, plan.head) == (embedding, head)


def test_ends_with_one_weight_are_sharded_both_or_not_at_all() -> None:
    def change(model: Any) -> None:
        model.lm_head = OtherLinear(8, 20)
        model.lm_head.weight = model.model.embed_tokens.weight

    plan = read_plan(_with(change))
    assert (plan.embedding, plan.head, plan.tied) == ("", "", ())


def test_the_plan_of_a_class_is_taken_where_the_model_has_none() -> None:
    model, expected = Toy(4, 2, 1), read_plan(Toy(4, 2, 1))
    model._tp_plan, model.tp_plan = model.tp_plan, None  # type: ignore[assignment]
    assert read_plan(model) == expected


def test_the_class_of_the_layers() -> None:
    model = Toy(4, 2, 2)
    model.before = nn.ModuleList([nn.Linear(2, 2, device=META)])  # another list, of another length
    assert transformer_layer_class(model) is Layer
    model.config.num_hidden_layers = 1
    model.before = nn.ModuleList([Attention(2, 1, 1, 2)])
    assert transformer_layer_class(model) is Attention
    model.config.num_hidden_layers = 3
    with pytest.raises(UnsupportedModelError, match="Toy has no list of 3 transformer layers"):
        transformer_layer_class(model)


# --- words that do not go together

LAYERS = "model.layers.*."
ATTN, MLP, EXPERTS = f"{LAYERS}self_attn.", f"{LAYERS}mlp.", f"{LAYERS}mlp.experts"
LATENT = f"{ATTN}kv_a_proj_with_mqa"
WHOLE_NORMS = dict.fromkeys((f"{ATTN}q_norm", f"{ATTN}k_norm"), "replicate")
WHOLE_EXPERTS = dict.fromkeys((f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"), "replicate")
MISTAKES: list[tuple[str, dict[str, str | None], str]] = [
    ("Qwen 3", WHOLE_NORMS, f"{ATTN}q_norm sees local heads"),
    ("Llama", {f"{ATTN}k_proj": "replicate"}, f"{ATTN}k_proj is whole beside local columns"),
    ("Llama", {f"{MLP}up_proj": "sequence_parallel"}, f"{MLP}up_proj is whole beside local columns"),
    ("Mixtral", {EXPERTS: None}, f"{EXPERTS} has sharded matrices, whose partial sums nothing adds"),
    ("Mixtral", WHOLE_EXPERTS, f"{EXPERTS} has no sharded matrices, and 'moe_tp_experts' multiplies its output"),
    ("Mixtral", {f"{EXPERTS}.gate_up_proj": "colwise"}, f"{EXPERTS}.gate_up_proj holds gate and up behind one another"),
    ("Mixtral", {f"{MLP}gate": "replicated_with_grad_allreduce"}, f"{MLP}gate has its full gradient on every rank"),
    ("Llama", {MLP[:-1]: "all_reduce"}, f"{MLP[:-1]} ends in a row layer, whose sum 'all_reduce' repeats"),
    ("DeepSeek V3", {LATENT: None}, f"{LATENT} feeds local heads"),
    ("DeepSeek V3", {LATENT: "replicate"}, f"{LATENT} feeds local heads"),
    ("GLM", {f"{MLP}gate_up_proj": "colwise"}, f"{MLP}gate_up_proj holds gate and up behind one another"),
    ("Phi 3", {f"{MLP}gate_up_proj": "colwise"}, f"{MLP}gate_up_proj holds gate and up behind one another"),
    ("Llama", {f"{ATTN}q_proj": "packed_colwise"}, f"{ATTN}q_proj is one matrix"),
    ("Llama", {f"{MLP}up_proj": "packed_colwise"}, f"{MLP}up_proj is one matrix"),
    (
        "Llama",
        {f"{LAYERS}input_layernorm": "replicated_with_grad_allreduce"},
        f"{LAYERS}input_layernorm has its full gradient",
    ),
    ("Llama", {"model.norm": "replicated_with_grad_allreduce"}, "model.norm has its full gradient on every rank"),
]
# Of these transformers' plan leaves matrices out, which a user's has to have.
ROUTER = {f"{MLP}gate": "replicate"}
COLUMNS = {f"{ATTN}q_b_proj": "colwise", f"{ATTN}kv_b_proj": "colwise", LATENT: "mla_kv_a_proj"}
MORE = {"Mixtral": ROUTER, "DeepSeek V3": {**ROUTER, **COLUMNS, f"{ATTN}o_proj": "rowwise"}}


@pytest.mark.parametrize("name, change, message", MISTAKES)
def test_a_plan_that_would_train_wrongly_is_refused(name: str, change: Any, message: str) -> None:
    architecture = next(each for each in OF_TRANSFORMERS if each.name == name)
    with META:
        model = architecture.make(2 * len(architecture.layers))
    known = {pattern_of(name) for name, _ in (*model.named_modules(), *model.named_parameters())}
    plan = {name: word for name, word in {**words_of_model(model), **MORE.get(name, {})}.items() if name in known}
    read_plan(model, plan)
    with pytest.raises(UnsupportedModelError) as error:
        read_plan(model, {name: word for name, word in {**plan, **change}.items() if word})
    assert f": its plan would train it wrongly: {message}" in str(error.value)
    assert str(error.value).endswith('spmd.check(lambda: hf.swap(model, plan=plan), inputs, {"tp": 2}) proves a plan')


def test_a_list_of_layers_keeps_packed_columns() -> None:
    architecture = next(each for each in OF_TRANSFORMERS if each.name == "GLM")
    with META:
        model = architecture.make(2)
    layers = read_plan(model).layers(model, 2)
    assert words_of(layers)["model.layers.0.mlp.gate_up_proj"] == "packed_colwise"

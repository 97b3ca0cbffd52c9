"""Swaps of a model that transformers knows nothing of: what is read off it and written into it, and refusals."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from neuronx_dist import comm
from neuronx_dist.hf import UnsupportedModelError, swap
from neuronx_dist.hf.loss import causal_lm_loss
from neuronx_dist.hf.model_plan import surroundings
from neuronx_dist.hf.plan_reading import read_plan
from neuronx_dist.hf.sequence_parallel import apply_sequence_parallel, check_sequence_parallel
from neuronx_dist.mesh import Mesh
from neuronx_dist.parallel_layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from neuronx_dist.spmd import spec_of
from tests.hf.toy import Toy


def refusal(tp: int, model: Any, kind: type[ValueError] = ValueError, **options: Any) -> str:
    with comm.as_rank(Mesh(tp, tp=tp), 0), pytest.raises(kind) as error:
        swap(model, **options)
    assert type(error.value) is kind
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear  # nothing was changed
    return str(error.value)


Q_K_V_O = "q_proj, k_proj, v_proj, o_proj"


def test_heads_that_are_refused() -> None:
    heads = "swap: Toy: {} attention heads over {} key/value heads are not divisible by tp={}: pass pad_heads=True, or "
    # 12 and 20, the sizes of the MLP and the vocabulary, are divisible by each tp here
    assert refusal(2, Toy(9, 3)) == heads.format(9, 3, 2) + "choose tp from [1, 3, 9]"
    assert refusal(4, Toy(6, 2)) == heads.format(6, 2, 4) + "choose tp from [1, 2, 6]"
    assert refusal(4, Toy(5, 1)) == heads.format(5, 1, 4) + "choose tp from [1, 5]"
    strange = f"{Q_K_V_O}; this model's attention has other layers"
    assert refusal(2, Toy(9, 3, names="qxvo"), pad_heads=True) == f"swap: Toy: tp=2 pads {strange}"
    both = "tp=4 replicates k_proj, v_proj and pads"
    assert refusal(4, Toy(8, 2, names="xkvo")) == f"swap: Toy: {both} {strange}"
    ungrouped = Toy(8, 2)
    for layer in ungrouped.model.layers:
        layer.self_attn.__class__ = type("Ungrouped", (nn.Module,), {})
    no_groups = f"{Q_K_V_O}, and this model's attention has no num_key_value_groups to set"
    assert refusal(4, ungrouped) == f"swap: Toy: {both} {no_groups}"


def test_sizes_that_are_refused_together() -> None:
    message = refusal(5, Toy(5, 5, vocab=7))
    assert message == "swap: Toy: up_proj of size 12 is not divisible by tp=5; down_proj of size 12 is not " + (
        "divisible by tp=5"
    )
    assert refusal(3, Toy(3, 3)) == (
        "swap: Toy: the vocabulary of 20 is not divisible by tp=3: pass pad_vocab=True, which adds 1 zero rows"
    )
    message = refusal(8, Toy(8, 4))  # key/value heads on two ranks each are no problem of their size
    assert "k_proj" not in message and "which adds 4 zero rows; up_proj of size 12" in message


def test_each_layers_size_is_checked_not_the_last_of_a_name() -> None:
    model = Toy(4, 2)
    with torch.device("meta"):
        model.model.layers[0].mlp.up_proj, model.model.layers[0].mlp.down_proj = nn.Linear(8, 13), nn.Linear(13, 8)
    assert refusal(
        2, model
    ) == "swap: Toy: up_proj of size 13 is not divisible by tp=2; down_proj of size 13 is not " + ("divisible by tp=2")


def test_each_attentions_heads_are_checked() -> None:
    model = Toy(4, 4, layers=1)
    model.model.layers[0].self_attn.num_heads = 6
    message = "swap: Toy: the model has 4 attention heads and self_attn of 6 heads: both are to be divisible by tp={}"
    assert refusal(4, model) == message.format(4)
    assert refusal(3, model, pad_heads=True, pad_vocab=True) == message.format(3)


DROPOUT = "such dropout works neither with sequence_parallel=True nor with attention_dropout"


@pytest.mark.parametrize(
    "tp, sequence_parallel, rates, listed",
    [
        (2, False, dict(attention_dropout=0.1), None),
        (2, True, dict(attention_dropout=0.1), None),
        (2, False, dict(residual_dropout=0.1), None),
        (2, False, dict(residual_dropout=0.1, attention_dropout=0.5), None),  # the residual's in another module
        (
            2,
            True,
            dict(text_config=SimpleNamespace(get_text_config=None, residual_dropout=0.1)),
            "residual_dropout=0.1: {} (0.0)",
        ),
        (2, True, dict(residual_dropout=0.0, embd_pdrop=0.0, attention_dropout=0.5), None),
        (2, True, dict(residual_dropout=1, drop_probability=0.5, summary_first_dropout=0.1), None),  # no rates
        (1, True, dict(residual_dropout=0.1, attention_dropout=0.1), None),
        (2, True, dict(residual_dropout=0.1), "residual_dropout=0.1: {} (0.0)"),
        (2, False, dict(resid_pdrop=0.2, attention_dropout=0.5), None),  # behind the row layer
        (2, True, dict(hidden_dropout_prob=0.5), "hidden_dropout_prob=0.5: {} (0.0)"),
        (2, True, dict(resid_pdrop=0.2, dropout=0.1), "resid_pdrop=0.2, dropout=0.1: {} (0.0)"),
    ],
)
def test_dropout_that_is_refused(tp: int, sequence_parallel: bool, rates: Any, listed: str | None) -> None:
    model = Toy(4, 2, **rates)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = rates.get("attention_dropout", 0.0)
        layer.self_attn.resid_dropout = nn.Dropout(rates.get("resid_pdrop", 0.0))
    if listed is not None:
        message = refusal(tp, model, UnsupportedModelError, sequence_parallel=sequence_parallel)
        assert message == f"swap: Toy with {listed.format(DROPOUT)} in one module; set it to 0 in the config"
    else:
        with comm.as_rank(Mesh(tp, tp=tp), 0):
            swap(model, sequence_parallel=sequence_parallel)


COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_key_value_groups")


@pytest.mark.parametrize(
    "tp, heads, kv_heads, counts",
    [(1, 4, 2, (4, 4, 2, 2)), (2, 4, 2, (2, 2, 1, 2)), (4, 8, 2, (2, 2, 1, 2)), (2, 9, 3, (6, 6, 2, 3))],
)
def test_attention_reads_local_numbers_of_heads(tp: int, heads: int, kv_heads: int, counts: Any) -> None:
    model = Toy(heads, kv_heads)
    for layer in model.model.layers:
        for name, count in zip(COUNTS, (heads, heads, kv_heads, heads // kv_heads)):
            setattr(layer.self_attn, name, count)
        layer.self_attn.n_heads = 8
        layer.self_attn.num_heads_in_words = "many"
        layer.mlp.num_heads = "none"
    with comm.as_rank(Mesh(tp, tp=tp), 0):
        assert swap(model, pad_heads=True) is model
    for layer in model.model.layers:
        assert tuple(getattr(layer.self_attn, name) for name in COUNTS) == counts
        assert layer.self_attn.n_heads == 8 // tp
        assert layer.mlp.num_heads == "none" and not hasattr(layer.mlp, "num_key_value_heads")
        assert "num_local_heads" not in vars(layer.self_attn)
    assert model.loss_function.func is causal_lm_loss
    assert model.loss_function.keywords == {"inplace_logits": False}
    with comm.as_rank(Mesh(tp, tp=tp), 0), pytest.raises(ValueError, match="this Toy is already swapped"):
        swap(model)


def test_only_attention_with_dropout_has_random_numbers_of_its_own() -> None:
    for tp, rate, wrapped in ((2, 0.1, True), (2, 0.0, False), (1, 0.1, False)):
        model = Toy(4, 2)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = rate
        with comm.as_rank(Mesh(tp, tp=tp), 0):
            swap(model, inplace_logits=True)
        for layer in model.model.layers:
            assert ("forward" in vars(layer.self_attn)) == wrapped and not layer.mlp.up_proj._forward_hooks
        assert model.loss_function.keywords == {"inplace_logits": True}


# --- sequence parallelism


@pytest.mark.parametrize(
    "name, module, where, refused",
    [
        ("embed_dropout", nn.Dropout(), "before", False),
        ("position_embeddings", nn.Embedding(4, 8), "before", True),
        ("embed_norm", nn.LayerNorm(8), "before", True),
        ("last_norm", nn.LayerNorm(8), "after", False),
        ("LastNorm", nn.LayerNorm(8), "after", False),
        ("projection", nn.Linear(8, 8), "after", True),
        ("act", nn.ReLU(), "after", False),
    ],
)
def test_what_sequences_may_be_sharded_before_and_after_the_layers(
    name: str, module: Any, where: str, refused: bool
) -> None:
    model = Toy(4, 2)
    plan = read_plan(model)
    children = model.model._modules
    model.model._modules = {name: module, **children} if where == "before" else {**children, name: module}
    check_sequence_parallel(model, plan)
    assert surroundings(model, plan) == ([name] if refused else [])


def test_gradients_of_what_is_whole_are_partial() -> None:
    model = Toy(4, 2, 1)
    with comm.as_rank(Mesh(2, tp=2), 0):
        swap(model, sequence_parallel=True)
        partial_ones = {name for name, param in model.named_parameters() if spec_of(param).sequence_parallel}
    norms = {f"model.{norm}.{kind}" for norm in ("layers.0.input_norm", "final_norm") for kind in ("weight", "bias")}
    assert partial_ones == norms | {"model.layers.0.mlp.down_proj.bias"}
    layers = {name: type(module) for name, module in model.named_modules()}
    assert layers["model.embed_tokens"] is ParallelEmbedding and layers["lm_head"] is ColumnParallelLinear
    assert layers["model.layers.0.mlp.down_proj"] is RowParallelLinear


@pytest.fixture
def hooks() -> Any:
    """The hooks of a model of two layers: whole, scatter (first layer alone), gather (attention and MLP)."""
    model = Toy(4, 2)
    apply_sequence_parallel(model, read_plan(model))

    def hook(module: nn.Module) -> Any:
        (function,) = module._forward_pre_hooks.values()
        return partial(function, module)

    first, second = model.model.layers
    assert not second._forward_pre_hooks and not first.input_norm._forward_pre_hooks
    return SimpleNamespace(whole=hook(model), scatter=hook(first), gather=hook(second.mlp), also=hook(first.self_attn))


def test_hidden_states_are_scattered_once_and_gathered_where_the_code_looks(hooks: Any) -> None:
    x, other = torch.arange(16.0).view(1, 4, 4), object()

    def rank() -> None:
        index = comm.rank("tp")
        mine = x[:, 2 * index : 2 * index + 2]
        for hook, given, expected in (
            (hooks.scatter, x, 2 * mine), (hooks.gather, mine, x), (hooks.also, mine, x),
        ):  # fmt: skip
            (first, rest), kwargs = hook((given, other), {"mask": other})
            assert torch.equal(first, expected) and rest is other and kwargs == {"mask": other}
            for name in ("hidden_states", "x"):
                args, kwargs = hook((), {name: given, "mask": other})
                assert args == () and torch.equal(kwargs.pop(name), expected) and kwargs == {"mask": other}
            with pytest.raises(StopIteration):
                hook((), {"states": given})

    comm.threads.run(Mesh(2, tp=2), rank)


def test_a_sequence_that_is_not_divisible_is_refused_with_the_next_that_is(hooks: Any) -> None:
    with comm.as_rank(Mesh(4, tp=4), 0), pytest.raises(ValueError) as error:
        hooks.scatter((torch.ones(2, 5, 4),), {})
    assert str(error.value) == "sequence parallelism: a sequence of 5 tokens is not divisible by tp=4; pad it to 8"


@pytest.mark.parametrize("keep, refused", [(0, False), (1, True), (torch.tensor([0]), True), (None, True)])
def test_part_of_the_logits(hooks: Any, keep: Any, refused: bool) -> None:
    assert hooks.whole((), {}) is None
    if not refused:
        assert hooks.whole((), {"logits_to_keep": keep}) is None
    else:
        with pytest.raises(ValueError, match="logits_to_keep would select positions"):
            hooks.whole((), {"logits_to_keep": keep})

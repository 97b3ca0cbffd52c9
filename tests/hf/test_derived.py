"""`swap(model, plan="derived")`: the plan is derived from the forward of the module itself."""

from __future__ import annotations

import copy
import os
import re
from functools import partial
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
from neuronx_dist.modules.lora import LoraConfig, get_lora_model
from neuronx_dist.modules.lora.model import adapters_of
from tests.hf.parity import differences, without_labels
from tests.hf.test_architectures import wrong
from tests.support.architectures import HEADS, HIDDEN, VOCAB, Architecture, images
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

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return (logits,) if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    return Model(**options).double()


IDS = {"input_ids": torch.randint(3, VOCAB, (4, 6), generator=torch.Generator().manual_seed(0))}


def derived(of: Any, inputs: Any, tp: int, **options: Any) -> dict[str, float]:
    """Returns the differences of a derived swap that are too large."""
    options = {"inputs": without_labels(of, inputs), **options}
    return wrong(differences(of, inputs, tp, plan="derived", **options))


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_hand_written_model(tp: int) -> None:
    assert derived(model(), IDS, tp) == {}


@pytest.mark.slow
def test_a_norm_of_heads_by_hand() -> None:
    of = model(make=BlockOf, attention=NormOfHeads)
    assert derived(of, IDS, 2) == {}
    assert derive(of, IDS, 2).attributes == {f"blocks.{number}.attn": {"n": 2, "kv": 1} for number in (0, 1)}


@pytest.mark.slow
def test_with_sequence_parallelism() -> None:
    assert derived(model(), IDS, 2, sequence_parallel=True) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", "BEiT", pytest.param("DeBERTa 2", marks=pytest.mark.full)])
def test_it_is_proven_by_the_checker(name: str) -> None:
    """Checks BEiT, whose positions an `lru_cache` remembers, and DeBERTa 2, which makes constants of numbers."""
    make, labelled = model, {**IDS, "labels": IDS["input_ids"]}
    if name:
        architecture = next(each for each in WITHOUT_PLAN if each.name == name)
        make, labelled = partial(architecture.make, 1), architecture.inputs()
    inputs = without_labels(make(), labelled)
    report = spmd.check(lambda: hf.swap(make(), plan="derived", inputs=inputs), labelled, {"tp": 2})
    assert report.ok, report


@pytest.mark.slow
def test_a_model_that_has_adapters_already() -> None:
    """Forward has the calls of PEFT's; its adapters too become columns and rows."""
    of = model()
    with comm.as_rank(Mesh(1), 0):
        get_lora_model(of, LoraConfig(lora_rank=4, target_modules=["qkv", "proj", "fc1", "fc2"]))
    for layer in adapters_of(of).values():
        nn.init.normal_(layer.lora_B.weight)
    assert derived(of, IDS, 2) == {}


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


# --- architectures with a table, and without one

_TINY: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": 16}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
_OF_BERT: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_attention_heads": HEADS}
_OF_BERT |= {"intermediate_size": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_OF_MPT: dict[str, Any] = {"vocab_size": VOCAB, "d_model": HIDDEN, "n_heads": HEADS}
_OF_DEBERTA: dict[str, Any] = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4}
_IMAGES: dict[str, Any] = {"image_size": 8, "patch_size": 4, "num_labels": 4}
_OF_BEIT: dict[str, Any] = {**_IMAGES, "drop_path_rate": 0.0, "use_relative_position_bias": True}
WITHOUT_PLAN = [
    Architecture("GPT BigCode", "GPTBigCodeForCausalLM", (), {**_TINY, **_NO_DROPOUT}, ("n_layer",)),
    Architecture("MPT", "MptForCausalLM", (), _OF_MPT, ("n_layers",)),
    Architecture("ESM", "EsmForMaskedLM", (), {**_OF_BERT, "token_dropout": False, "pad_token_id": 0}),
    Architecture("DeBERTa 2", "DebertaV2ForMaskedLM", (), {**_OF_BERT, **_OF_DEBERTA, "pooler_hidden_size": HIDDEN}),
    Architecture("DINOv2", "Dinov2ForImageClassification", (), {**_OF_BERT, **_IMAGES, "mlp_ratio": 2}, inputs=images),
    Architecture("BEiT", "BeitForImageClassification", (), {**_OF_BERT, **_OF_BEIT}, inputs=images),
]


SAMPLE = ("GPT BigCode", "ESM", "BEiT", "GPT-2")


def _sampled(architectures: list[Architecture]) -> list[Any]:
    return [each if each.name in SAMPLE else pytest.param(each, marks=pytest.mark.full) for each in architectures]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4] if FULL else [2])
@pytest.mark.parametrize("architecture", _sampled(WITHOUT_PLAN), ids=lambda each: each.name)
def test_an_architecture_without_a_plan(architecture: Architecture, tp: int) -> None:
    of = architecture.make(2)
    with pytest.raises(UnsupportedModelError, match="no tensor-parallel plan|not in the plan"):
        read_plan(of)
    assert derived(of, architecture.inputs(), tp) == {}


@pytest.mark.slow
@pytest.mark.parametrize("architecture", _sampled(OF_TRANSFORMERS), ids=lambda each: each.name)
def test_an_architecture_with_a_plan(architecture: Architecture) -> None:
    of = architecture.make(2 * len(architecture.layers))
    assert derived(of, architecture.inputs(), 2) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT (masked language model)", "T5"])
def test_the_words_are_those_of_the_table(name: str) -> None:
    """Words equal the table's, but for a transform before the head of BERT, which is whole there and gathers here."""
    of = BY_NAME[name].make(2 * len(BY_NAME[name].layers))
    plan = derive(of, without_labels(of, BY_NAME[name].inputs()), 2)
    found = read_plan(of, plan.words, derived=plan)
    table = read_plan(of)
    more = {key: style for key, style in found.styles.items() if style != "whole" and key not in table.styles}
    assert more == ({"cls.predictions.transform.dense": "gathered_column"} if "BERT" in name else {})
    assert {key: found.styles[key] for key in table.styles} == table.styles
    assert (found.embedding, found.head, found.tied, found.parameters, found.local_logits) == (
        table.embedding, table.head, table.tied, table.parameters, table.local_logits
    )  # fmt: skip


@pytest.mark.slow
def test_fewer_key_value_heads_than_ranks_are_replicated_as_by_a_plan_of_words() -> None:
    llama = BY_NAME["Llama"]
    assert derived(llama.make(1), llama.inputs(), 4) == {}


# --- what is refused, by name


class FixedHeads(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(4, 6, 3, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 6, -1))


class DividedByHeads(Attention):
    """The number of heads has two uses: it is a count, and a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.num_heads


class NormOfHeads(nn.Module):
    """Attention with two numbers of heads in one line: a head of half the size is past that line, and fails later."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.n, self.kv, self.d = heads, heads // 2, dim // heads
        self.q, self.k, self.proj = nn.Linear(dim, dim), nn.Linear(dim, dim // 2), nn.Linear(dim, dim)
        self.scale = nn.Parameter(torch.randn(self.d))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k = self.norm(self.q(x).view(b, t, self.n, self.d)), self.k(x).view(b, t, self.kv, self.d)
        k = k.repeat_interleave(self.n // self.kv, dim=2).transpose(1, 2)
        return self.proj(F.scaled_dot_product_attention(q.transpose(1, 2), k, k).transpose(1, 2).flatten(2))


class BlockOf(Block):
    def __init__(self, dim: int, heads: int, attention: type[nn.Module] = Attention) -> None:
        super().__init__(dim, heads)
        self.attn = attention(dim, heads)


@pytest.mark.slow
@pytest.mark.parametrize("attention", [FixedHeads, DividedByHeads])
def test_a_number_of_the_whole_size_that_is_no_attribute(attention: type[Attention]) -> None:
    of = model(make=BlockOf, attention=attention)
    with pytest.raises(UnsupportedModelError, match="blocks.0.attn computes with a number of the whole size") as error:
        derived(of, IDS, 2)
    assert "replace.apply(model, [LayerPlan(name, style), ...])" in str(error.value)  # words need a config


def test_heads_that_tp_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"blocks.0.attn.qkv: 2 ranks do not divide 3 .reshape at .*but \[3\] do"):
        derived(model(heads=3, dim=24), IDS, 2)


class Choosing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class TwoDropouts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class DropsBoth(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, -1, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        heads = F.dropout(F.scaled_dot_product_attention(q, k, v), 0.5, self.training)
        return F.dropout(self.proj(heads.transpose(1, 2).flatten(2)), 0.5, self.training)


def test_a_forward_that_cannot_be_recorded() -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be recorded"), comm.as_rank(Mesh(2, tp=2), 0):
        hf.swap(model(make=Choosing), plan="derived", inputs=IDS)


def test_arguments_that_do_not_fit() -> None:
    with comm.as_rank(Mesh(2, tp=2), 0):
        with pytest.raises(ValueError, match="pass inputs="):
            hf.swap(model(), plan="derived")
        with pytest.raises(ValueError, match="inputs are example arguments"):
            hf.swap(model(), inputs=IDS)
        with pytest.raises(ValueError, match=re.escape("plan='derive' is no plan")):
            hf.swap(model(), plan="derive")
        with pytest.raises(ValueError, match="OptimizedModule wraps a model: swap the model, and wrap, compile"):
            hf.swap(torch.compile(model(), backend="eager"), plan="derived", inputs=IDS)
        with pytest.raises(ValueError, match="LoraModel wraps a model"):
            hf.swap(get_lora_model(model(), LoraConfig(target_modules=["qkv"])), plan="derived", inputs=IDS)
        with pytest.raises(UnsupportedModelError, match="its forward fails on the inputs input_ids"):
            hf.swap(model(), plan="derived", inputs={"input_ids": torch.randn(4, 6)})


# --- what a derived swap changes


def test_dropout_of_heads_draws_from_the_stream_of_a_rank() -> None:
    with comm.as_rank(Mesh(2, tp=2), 0):
        of = hf.swap(model(make=TwoDropouts, dropout=0.1), plan="derived", inputs=IDS)
    local = [path for path, module in of.named_modules() if "forward" in vars(module)]
    assert local == ["blocks.0.attn.attn_drop", "blocks.1.attn.attn_drop"]


def test_dropout_of_heads_and_of_the_residual_in_one_module() -> None:
    """Between columns and row layer masks differ over tp; behind it they are equal, as in a plan of words."""

    def rank() -> Any:
        of = hf.swap(model(make=BlockOf, attention=DropsBoth), plan="derived", inputs=IDS).train()
        masks: list[torch.Tensor] = []
        of.blocks[0].attn.proj.register_forward_pre_hook(lambda module, args: masks.append(args[0] == 0))
        of.blocks[0].attn.register_forward_hook(lambda module, args, output: masks.append(output == 0))
        spmd.random.manual_seed(3)
        of(**IDS)
        return *masks, torch.rand(1)

    (heads, residual, number), (other_heads, other_residual, other_number) = comm.threads.run(Mesh(2, tp=2), rank)
    assert residual.any() and torch.equal(residual, other_residual) and torch.equal(number, other_number)
    assert heads.shape == other_heads.shape and not torch.equal(heads, other_heads)


class Small(nn.Module):
    """Two layers with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.between(F.gelu(self.up(x))))


class ConstantOfHeads(Small):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], self.heads, 8)
        return (heads * torch.full((), float(self.heads))).flatten(2)


class ReadsSizes(Small):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.up.out_features / self.down.in_features**2 + self.up.in_features


class ReadByAColumnToo(Small):
    def __init__(self) -> None:
        super().__init__()
        self.position, self.column = nn.Embedding(6, 8), nn.Linear(8, 32)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        position = self.position(torch.arange(6))
        heads = x.view(*x.shape[:2], -1, 8) * position[:, None]
        return heads.flatten(2) + self.column(position)


class SecondName(Small):
    def __init__(self) -> None:
        super().__init__()
        self.w = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + F.linear(x, self.w)[..., :16]


class TiedAndRead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids)) + self.embed.weight.mean()


class DropsAtTheRoot(Small):
    def __init__(self) -> None:
        super().__init__()
        self.residual = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = self.up(x)
        x = self.residual(x)
        return x + self.down(F.dropout(columns, 0.5, self.training))


@pytest.mark.parametrize(
    "make, refused",
    [
        (ConstantOfHeads, "the constant full has other numbers"),
        (ReadsSizes, ""),
        (ReadByAColumnToo, ""),
        (SecondName, ""),
        (TiedAndRead, ""),
        (DropsAtTheRoot, "draws random numbers for shards, .* and residual for whole values"),
    ],
)
def test_what_meets_shards_beside_layers_is_right_or_refused(make: type[nn.Module], refused: str) -> None:
    torch.manual_seed(0)
    module = make().double()
    inputs = {"input_ids": IDS["input_ids"]} if make is TiedAndRead else {"x": torch.randn(2, 6, 16).double()}
    if refused:
        with comm.as_rank(Mesh(2, tp=2), 0), pytest.raises(UnsupportedModelError, match=refused):
            hf.swap(module, plan="derived", inputs=inputs)
    else:
        assert not wrong(differences(module, inputs, 2, plan="derived", inputs=inputs))


@pytest.mark.slow
def test_layers_that_gather_are_reported_and_take_a_residual_of_a_part_of_the_sequence() -> None:
    bloom = BY_NAME["BLOOM"]
    with pytest.warns(UserWarning, match="gathers the output of 8 layers.*query_key_value: "):
        assert derived(bloom.make(2 * len(bloom.layers)), bloom.inputs(), 2, sequence_parallel=True) == {}


def test_a_swap_that_is_refused_leaves_the_model_as_it_was() -> None:
    of = model(make=BlockOf, attention=FixedHeads)
    state = {name: (id(x), tuple(x.shape)) for name, x in of.named_parameters()}
    with comm.as_rank(Mesh(2, tp=2), 0), pytest.raises(UnsupportedModelError):
        hf.swap(of, plan="derived", inputs=IDS)
    assert {name: (id(x), tuple(x.shape)) for name, x in of.named_parameters()} == state


def test_a_model_on_meta() -> None:
    of, whole = copy.deepcopy(model()).to("meta"), model().state_dict()
    with comm.as_rank(Mesh(2, tp=2), 0):
        hf.load_pretrained(hf.swap(of, plan="derived", inputs=IDS), whole)
    assert of.blocks[0].attn.num_heads == 2 and of.blocks[0].fc1.weight.shape == (2 * HIDDEN, HIDDEN)


def test_a_number_that_is_not_changed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the proof the view of the heads is wrong: the comparison of values shows it."""
    monkeypatch.setattr("neuronx_dist.hf.derived.prove", lambda source, program, regions, attributes, *more: {})
    with pytest.raises(RuntimeError, match="shape"):
        derived(model(), IDS, 2)

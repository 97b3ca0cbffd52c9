"""Swapped models whose sequences are cut over cp ranks: loss and weights after three steps are those of one process."""

from __future__ import annotations

import copy
import logging
import sys
from math import prod
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb

import neuronx_dist as nxd
from neuronx_dist import comm, spmd
from neuronx_dist.attention import zigzag_order
from neuronx_dist.hf import UnsupportedModelError, full_state_dict, materialize, swap, transformer_layer_class
from neuronx_dist.hf.context_parallel import _attention
from neuronx_dist.mesh import Mesh
from tests.hf.models import SIZES, VOCAB, error, llama_config, meta_model, reference_model
from tests.hf.parity import AllInFloat64
from tests.support.more_architectures import OF_TRANSFORMERS

STEPS, RATE, LENGTH = 3, 0.2, 16
_TINY = dict(SIZES, num_hidden_layers=2, max_position_embeddings=32, initializer_range=0.2, use_cache=False)
_GPT2 = dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2, use_cache=False)
_BERT = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
_NO_DROPOUT_OF_BERT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.2)
_NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_OSS = dict(_TINY, head_dim=8, sliding_window=5, num_local_experts=4, num_experts_per_tok=2)


def _eager(model: Any) -> Any:
    model.set_experts_implementation("eager")  # grouped products have no float64
    return model


MODELS: dict[str, Any] = {
    "llama": lambda: reference_model(llama_config()),
    "three heads": lambda: reference_model(llama_config(heads=3, kv_heads=3)),
    "bert": lambda: reference_model(BertConfig(**_BERT, **_NO_DROPOUT_OF_BERT), BertForMaskedLM),
    "gpt2": lambda: reference_model(GPT2Config(**_GPT2, **_NO_DROPOUT), GPT2LMHeadModel),
    "mistral": lambda: reference_model(MistralConfig(**_TINY, head_dim=8, sliding_window=5), MistralForCausalLM),
    "gpt-oss": lambda: _eager(
        reference_model(GptOssConfig(**_OSS), GptOssForCausalLM)
    ),  # sinks, and windows in some layers
}


def batch_of(step: int, documents: list[list[int]] | None) -> dict[str, torch.Tensor]:
    """Returns token ids, labels some of which are ignored, and positions of packed documents."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (4, LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, :5] = labels[1, -4:] = labels[3, 7] = -100
    if documents is None:
        return {"input_ids": ids, "labels": labels}
    positions = torch.arange(LENGTH).repeat(4, 1)
    for row, starts in enumerate(documents):
        for start in starts:
            labels[row, start] = -100  # no document predicts the next
            positions[row, start:] = torch.arange(LENGTH - start)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def loss_of_one_process(model: Any, batch: dict[str, torch.Tensor], documents: list[list[int]] | None) -> torch.Tensor:
    """Returns the mean over all labels, of documents that are computed one by one."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row in range(4):
        bounds = [0, *(documents[row] if documents else ()), LENGTH]
        for start, stop in zip(bounds, bounds[1:]):
            ids, labels = (batch[name][row : row + 1, start:stop] for name in ("input_ids", "labels"))
            logits = model(input_ids=ids).logits[0, :-1]
            total = total + F.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
            count += int((labels[0, 1:] != -100).sum())
    return total / count


def compare(
    name: str, mesh: Mesh, balance: str | None, documents: list[list[int]] | None = None, **options: Any
) -> None:
    model = MODELS[name]()
    initial = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    with AllInFloat64():
        for step in range(STEPS):
            loss = loss_of_one_process(model, batch_of(step, documents), documents)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss))

    def rank() -> tuple[list[float], dict[str, torch.Tensor]]:
        local = swap(copy.deepcopy(initial), **options)
        optimizer = torch.optim.SGD(local.parameters(), lr=RATE)
        found = []
        for step in range(STEPS):
            rows = {key: x.chunk(mesh.dp)[comm.rank("dp")] for key, x in batch_of(step, documents).items()}
            part = nxd.get_batch_on_this_context_parallel_rank(rows, balance)
            items = nxd.global_num_items(part["labels"], dtype=torch.float64)
            optimizer.zero_grad()
            with AllInFloat64():
                loss = local(**part, num_items_in_batch=items).loss
                loss.backward()
            nxd.reduce_gradients(local)
            optimizer.step()
            found.append(float(comm.all_reduce(loss.detach(), ("dp", "cp"))) / (mesh.dp * mesh.cp))
        return found, full_state_dict(local)

    for found, weights in comm.threads.run(mesh, rank):
        assert found == pytest.approx(losses, rel=1e-10)
        for key, value in model.state_dict().items():
            if key in weights:
                assert error(weights[key], value) < 1e-10, key


DOCUMENTS = [[3, 11], [], [7], [1, 2, 8]]


@pytest.mark.parametrize(
    "name, sizes, balance, documents, options",
    [
        ("llama", dict(cp=2), None, None, {}),
        pytest.param("llama", dict(cp=2), None, DOCUMENTS, {}, marks=pytest.mark.slow),
        ("llama", dict(cp=2, tp=2), "zigzag", DOCUMENTS, dict(sequence_parallel=True)),
        ("llama", dict(cp=2), "zigzag", DOCUMENTS, dict(context_parallel="ulysses")),
        pytest.param("llama", dict(cp=4), "zigzag", None, dict(context_parallel="ulysses"), marks=pytest.mark.slow),
        pytest.param(
            "three heads",
            dict(cp=2, tp=2),
            "zigzag",
            None,
            dict(context_parallel="ulysses", pad_heads=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama", dict(cp=4), "zigzag", DOCUMENTS, dict(context_parallel="ring+ulysses"), marks=pytest.mark.slow
        ),
        pytest.param(
            "llama",
            dict(cp=4, tp=2),
            None,
            None,
            dict(context_parallel="ring+ulysses:2", sequence_parallel=True),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt-oss", dict(cp=4), "zigzag", None, dict(context_parallel="ring+ulysses"), marks=pytest.mark.slow
        ),
        pytest.param("mistral", dict(cp=4), None, DOCUMENTS, dict(context_parallel="auto"), marks=pytest.mark.slow),
        pytest.param("llama", dict(cp=2, tp=2, dp=2), "zigzag", None, {}, marks=pytest.mark.slow),
        pytest.param("llama", dict(cp=4, tp=2), None, DOCUMENTS, {}, marks=pytest.mark.full),
        pytest.param("gpt2", dict(cp=4), "zigzag", None, {}, marks=pytest.mark.slow),
        pytest.param("gpt2", dict(cp=2, tp=2), None, None, dict(context_parallel="ulysses"), marks=pytest.mark.full),
        pytest.param("mistral", dict(cp=4), None, None, {}, marks=pytest.mark.slow),
        ("mistral", dict(cp=2, dp=2), "zigzag", None, {}),
        pytest.param("gpt-oss", dict(cp=2), "zigzag", None, {}, marks=pytest.mark.slow),
    ],
)
def test_three_steps_are_those_of_one_process(
    name: str, sizes: dict[str, int], balance: str | None, documents: Any, options: Any
) -> None:
    degrees = {"tp": 1, "cp": 1, "dp": 1, **sizes}
    mesh = Mesh(degrees["tp"] * degrees["cp"] * degrees["dp"], tp=degrees["tp"], cp=degrees["cp"])
    compare(name, mesh, balance, documents, **options)


def test_auto_takes_the_method_by_which_a_rank_sends_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few key/value heads: ring; as many as query heads: Ulysses, where cp divides them; a short window: ring."""
    lines: list[str] = []
    monkeypatch.setattr(logging.Logger, "info", lambda self, text, *values: lines.append(text % values))

    def taken(cp: int, heads: int, kv_heads: int, window: int | None, balance: str | None) -> str:
        def rank() -> None:
            q, k = (torch.zeros(1, n, 8, 2) for n in (heads, kv_heads))
            places = torch.arange(8 * cp) if balance is None else zigzag_order(8 * cp, cp)
            positions = places.chunk(cp)[comm.rank("cp")][None]
            nxd.get_batch_on_this_context_parallel_rank({"input_ids": torch.zeros(1, 8 * cp)}, balance)
            _attention("auto", nn.Identity(), q, k, k, None, sliding_window=window, position_ids=positions)

        lines.clear()
        comm.threads.run(Mesh(cp, cp=cp), rank)
        assert len({*lines}) == 1 and len(lines) == cp
        return lines[0].split(";")[0].rpartition(" ")[2]

    assert taken(2, 8, 2, None, None) == "ring"
    assert taken(2, 8, 8, None, "zigzag") == "ulysses"
    assert taken(4, 8, 8, 4, None) == "ring"
    assert taken(4, 8, 8, 4, "zigzag") == "ulysses"
    assert taken(4, 6, 6, None, None) == "ring+ulysses:2"


@pytest.mark.parametrize("method, bound", [("ring", 1.02), ("ulysses", 1.08)])
def test_activations_take_one_part_in_cp_of_the_memory(method: str, bound: float) -> None:
    """Bytes that are saved for backward; Ulysses saves the output of attention in both orders, by heads and by rows."""
    model = meta_model(llama_config(layers=1, kv_heads=4), dtype=torch.float32)
    batch = {name: x[:2].repeat(1, 16) for name, x in batch_of(0, None).items()}

    def rank() -> int:
        local = swap(copy.deepcopy(model), context_parallel=method)
        materialize(local, seed=0)
        weights = {param.untyped_storage()._cdata for param in local.parameters()}
        saved = {}

        def save(x: torch.Tensor) -> torch.Tensor:
            saved[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x

        part = nxd.get_batch_on_this_context_parallel_rank(batch, "zigzag")
        items = nxd.global_num_items(part["labels"])
        with torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
            local(**part, num_items_in_batch=items)
        return sum(size for address, size in saved.items() if address not in weights)

    alone, *parts = (comm.threads.run(Mesh(cp, cp=cp), rank) for cp in (1, 2, 4))
    for of_ranks in parts:
        assert all(1 <= size * len(of_ranks) / alone[0] < bound for size in of_ranks), (alone, of_ranks)


@pytest.mark.parametrize(
    "method, cp, words",
    [
        ("rings", 4, r"is not one of auto, ring, ulysses, ring\+ulysses, ring\+ulysses:2 \(cp=4\)"),
        ("ring+ulysses", 2, r"is not one of auto, ring, ulysses \(cp=2\)"),
        ("ulysses", 2, r"3 attention heads cannot be divided among tp=1 x 2 ranks of cp=2"),
    ],
)
def test_methods_that_do_not_fit_are_refused(method: str, cp: int, words: str) -> None:
    model = MODELS["three heads"]()
    with pytest.raises(ValueError, match=words):
        comm.threads.run(Mesh(cp, cp=cp), lambda: swap(copy.deepcopy(model), context_parallel=method))


def _without(name: str) -> Any:
    return lambda part: {key: x for key, x in part.items() if key != name}


def _unsplit(part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns every other token."""
    positions = torch.arange(comm.rank("cp"), LENGTH, 2).expand(4, -1)
    return {**part, "position_ids": positions}


@pytest.mark.parametrize("name, method", [("llama", "ring"), ("llama", "ulysses"), ("bert", "ring"), ("bert", "auto")])
def test_padding_on_the_right_counts_nowhere(name: str, method: str) -> None:
    """Loss and gradients of rows of different lengths, with the mask and the positions of transformers' collators.

    BERT sees all tokens but padding, and ranks have unequal numbers of labels.
    """
    model, causal = MODELS[name](), name != "bert"
    batch = batch_of(0, None)
    mask = (torch.arange(LENGTH) < torch.tensor([[5], [LENGTH], [11], [8]])).long()
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    batch |= {"attention_mask": mask, "position_ids": positions, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    with AllInFloat64():
        loss = model(**batch).loss
        loss.backward()

    def rank() -> None:
        local = swap(copy.deepcopy(model), context_parallel=method)
        local.zero_grad()
        part = nxd.get_batch_on_this_context_parallel_rank(batch, "zigzag" if causal else None, causal=causal)
        items = nxd.global_num_items(part["labels"], dtype=torch.float64)
        with AllInFloat64():
            share = local(**part, num_items_in_batch=items).loss
            share.backward()
        nxd.reduce_gradients(local)
        assert error(comm.all_reduce(share.detach(), "cp") / 2, loss.detach()) < 1e-10
        gradients = full_state_dict(local, gradients=True)
        for key, param in model.named_parameters():
            difference = float((gradients[key] - param.grad).norm())
            assert min(error(gradients[key], param.grad), difference / 1e-3) < 1e-10, key  # a key's bias: 0
        wrong = nxd.get_batch_on_this_context_parallel_rank(batch, "zigzag" if causal else None, causal=not causal)
        with pytest.raises(ValueError, match=f"its labels are .*to be shifted: split .*causal={causal}"):
            local(**wrong)
        with pytest.raises(ValueError, match="the auxiliary loss of its routers would count padding"):
            local.config.output_router_logits = True
            local(**part)

    def wrongly_split() -> None:
        wrong = nxd.get_batch_on_this_context_parallel_rank(batch, causal=not causal)
        local = swap(copy.deepcopy(model))
        with pytest.raises(ValueError, match="its labels are .*to be shifted"):
            local(**{key: x.clone() for key, x in wrong.items()})  # as on another device
        with pytest.raises(ValueError, match="its labels are .*to be shifted"):
            local(**{key: x for key, x in wrong.items() if key != "labels"})

    comm.threads.run(Mesh(4, cp=2, tp=2) if method == "auto" else Mesh(2, cp=2), rank)
    comm.threads.run(Mesh(2, cp=2), wrongly_split)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [dict(pp=2, cp=2), dict(pp=2, cp=2, tp=2)])
def test_a_pipeline_of_packed_documents(sizes: dict[str, int]) -> None:
    """Two stages, two microbatches, layers that are recomputed in backward; with tp sequence parallelism."""
    model = MODELS["llama"]()
    loss = loss_of_one_process(model, batch_of(0, DOCUMENTS), DOCUMENTS)
    loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    mesh = Mesh(prod(sizes.values()), **sizes)

    def rank() -> None:
        local = swap(copy.deepcopy(model), sequence_parallel=mesh.tp > 1)
        pipeline = nxd.NxDPPModel(
            local,
            transformer_layer_cls=transformer_layer_class(local),
            num_microbatches=2,
            input_names=["input_ids", "labels", "position_ids", "num_items_in_batch"],
            output_loss_value_spec={"loss": True, "logits": False},
            auto_partition=True,
            broadcast_and_average_loss=True,
        )
        nxd.recompute(pipeline)
        part = nxd.get_batch_on_this_context_parallel_rank(batch_of(0, DOCUMENTS), "zigzag")
        items = nxd.global_num_items(part["labels"], 2, dtype=torch.float64)
        found = pipeline.run_train(**part, num_items_in_batch=items)
        assert error(found, loss.detach()) < 1e-10
        with pytest.raises(ValueError, match="labels equal input_ids: they must be shifted"):
            pipeline.eval().run_eval(**{**part, "labels": part["input_ids"]}, num_items_in_batch=items)
        for name, gradient in full_state_dict(pipeline, gradients=True).items():
            assert error(gradient, gradients[name]) < 1e-10, name

    comm.threads.run(mesh, rank)


@pytest.mark.parametrize(
    "change, words",
    [
        (_without("position_ids"), "LlamaForCausalLM with cp=2 needs position_ids"),
        (_unsplit, r"position_ids of 2 .* ranks, 0\.\.14, 1\.\.15 in row 0, are no split of a sequence"),
        (lambda part: {**part, "attention_mask": part["input_ids"] * 0}, "reads no attention_mask: leave it out"),
        (lambda part: {**part, "labels": part["input_ids"]}, "labels equal input_ids: they must be shifted"),
    ],
)
def test_inputs_that_are_no_split_are_refused(change: Any, words: str) -> None:
    def rank() -> None:
        local = swap(reference_model(llama_config(layers=1)))
        with pytest.raises(ValueError, match=words):
            local(**change(nxd.get_batch_on_this_context_parallel_rank(batch_of(0, None))))

    comm.threads.run(Mesh(2, cp=2), rank)


def _of_a_user(name: str) -> Any:
    model = next(one for one in OF_TRANSFORMERS if one.name == name).make(2)
    model.__class__ = type("OfAUser", (type(model),), {})
    return model


_WINDOW = dict(_TINY, use_sliding_window=True, sliding_window=5, num_experts=4, moe_intermediate_size=8)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: _of_a_user("GPT-J"), "OfAUser computes attention in code of its own"),
        (lambda: _of_a_user("Gemma 3"), "OfAUser has masks that are more than causal"),
        (
            lambda: reference_model(Qwen2MoeConfig(**_WINDOW), Qwen2MoeForCausalLM),
            r"has a window in its mask only, .* \(sliding_window=5\)",
        ),
        (
            lambda: reference_model(RobertaConfig(**_BERT, is_decoder=True), RobertaForCausalLM),
            "has positions that begin after pad_token_id",
        ),
    ],
)
def test_models_whose_parts_need_more_than_their_tokens_are_refused(make: Any, words: str) -> None:
    """Subclasses in a user's file, windows that only a mask has, positions that do not begin with 0."""
    model = make()
    with pytest.raises(UnsupportedModelError, match=words):
        comm.threads.run(Mesh(2, cp=2), lambda: swap(copy.deepcopy(model)))


def test_a_subclass_without_a_readable_source_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class of a notebook: its code is that of transformers' class, with a config that no other model shares."""
    model = reference_model(llama_config(layers=1))
    model.__class__ = type("OfANotebook", (LlamaForCausalLM,), {"__module__": "cell"})
    monkeypatch.setitem(sys.modules, "cell", ModuleType("cell"))
    whole = float(model(**batch_of(0, None)).loss.detach())

    def rank() -> float:
        local = copy.deepcopy(model)
        other = LlamaForCausalLM(local.config)
        swap(local)
        assert other.config._attn_implementation == "sdpa"
        part = nxd.get_batch_on_this_context_parallel_rank(batch_of(0, None))
        return float(comm.all_reduce(local(**part).loss.detach(), "cp")) / 2

    assert comm.threads.run(Mesh(2, cp=2), rank) == pytest.approx([whole] * 2, rel=1e-6)


class _OfThisRank(LlamaAttention):
    """An attention of the local tokens, not by transformers' interface."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any = None, **options: Any) -> Any:
        sizes = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (
            layer(hidden_states).view(sizes).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def _replace_attention(model: Any) -> None:
    model.model.layers[0].self_attn.__class__ = _OfThisRank


def _set_another(model: Any) -> None:
    model.set_attn_implementation("sdpa")


_OLMOE = next(one for one in OF_TRANSFORMERS if one.name == "OLMoE")  # its attention is not sharded over tp


@pytest.mark.parametrize(
    "make, change",
    [
        (lambda: reference_model(llama_config(layers=1)), _replace_attention),
        (lambda: reference_model(llama_config(layers=1)), _set_another),
        (lambda: _OLMOE.make(1), _set_another),
    ],
)
def test_an_attention_that_sees_this_ranks_tokens_only_is_refused(make: Any, change: Any) -> None:
    model = make()
    batch = {key: x.clamp(max=model.config.vocab_size - 1) for key, x in batch_of(0, None).items()}

    def rank() -> None:
        local = swap(copy.deepcopy(model))
        part = nxd.get_batch_on_this_context_parallel_rank(batch)
        with AllInFloat64():
            local(**part)
            change(local)
            with pytest.raises(UnsupportedModelError, match="with cp=2 saw the tokens of this rank only"):
                local(**part)

    comm.threads.run(Mesh(2, cp=2), rank)


def test_calls_beside_the_models_forward_are_checked() -> None:
    """Value heads call the inner model; a cache's keys are those of other tokens."""

    def rank() -> None:
        local = swap(reference_model(llama_config(layers=1)))
        part = nxd.get_batch_on_this_context_parallel_rank(batch_of(0, None))
        ids, positions = part["input_ids"], part["position_ids"]
        for call in (local.model, local.model.forward, copy.deepcopy(local).model.forward):
            with pytest.raises(ValueError, match="LlamaModel with cp=2 needs position_ids"):
                call(ids)
        with pytest.raises(ValueError, match="LlamaModel with cp=2 needs position_ids"):
            local.forward(**_without("position_ids")(part))
        with pytest.raises(ValueError, match="LlamaModel with cp=2 reads no attention_mask"):
            local.model(ids, position_ids=positions, attention_mask=ids * 0)
        cache = local.model(ids, position_ids=positions, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="a cache is not possible .* pass use_cache=False, or use cp=1"):
            local.model(ids, position_ids=positions, past_key_values=cache)

    comm.threads.run(Mesh(2, cp=2), rank)


def test_a_split_is_seen_by_its_positions() -> None:
    """Both splits of one batch, one after the other, in one model and one buffer that numpy fills: no setting says."""

    def rank() -> list[float]:
        local = swap(reference_model(llama_config(layers=1)))
        found, positions = [], torch.zeros(4, LENGTH // 2, dtype=torch.long)
        for balance in (None, "zigzag"):
            part = nxd.get_batch_on_this_context_parallel_rank(batch_of(0, None), balance)
            positions.numpy()[:] = part["position_ids"].numpy()
            found.append(float(comm.all_reduce(local(**{**part, "position_ids": positions}).loss.detach(), "cp")))
        return found

    for contiguous, zigzag in comm.threads.run(Mesh(2, cp=2), rank):
        assert contiguous == pytest.approx(zigzag, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method, balance", [("ring", "zigzag"), ("ulysses", None), ("ring+ulysses", "zigzag"), ("auto", "none")]
)
def test_a_check_accepts_a_split_and_refuses_that_ranks_have_the_same_tokens(method: str, balance: str | None) -> None:
    def step(model: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> None:
        part, items = batch, torch.ones(())
        if balance != "none":
            part = nxd.get_batch_on_this_context_parallel_rank(batch, balance)
            items = nxd.global_num_items(part["labels"])
        model(**part, num_items_in_batch=items).loss.backward()
        nxd.reduce_gradients(model)

    def make() -> Any:
        return swap(meta_model(llama_config(layers=1), dtype=torch.float32), context_parallel=method)

    ids = torch.zeros(2, 8, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids}
    mesh = Mesh(4, cp=4) if method == "ring+ulysses" else Mesh(4, cp=2, tp=2)
    report = spmd.check(make, batch, mesh, step=step)
    assert report.ok if balance != "none" else "is the same on all ranks of cp" in str(report), str(report)


_REFUSED = {
    "Gemma 2": "caps the scores of attention",
    "Gemma 3": "masks that are more than causal",
    "Mamba": "layers that pass a state along the sequence: linear_attention",
    **dict.fromkeys(("BLOOM", "GPT-J", "Falcon", "Falcon (ALiBi)"), "attention in code of its own"),
    "RoBERTa": "positions that begin after pad_token_id",
    **dict.fromkeys(("T5", "ViT"), "neither a causal nor a masked"),
    **dict.fromkeys(("BERT (classification)", "Llama (classification)", "BART"), "neither a causal nor a masked"),
    "Whisper": "neither a causal nor a masked",
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("architecture", OF_TRANSFORMERS, ids=lambda architecture: architecture.name)
def test_an_architecture_is_exact_or_refused(architecture: Any) -> None:
    """Loss and all gradients at cp 2, in zig-zag order, without num_items_in_batch."""
    model = architecture.make(2 * len(architecture.layers))
    if architecture.name in _REFUSED:
        with pytest.raises(UnsupportedModelError, match=_REFUSED[architecture.name]):
            comm.threads.run(Mesh(2, cp=2), lambda: swap(copy.deepcopy(model)))
        return
    inputs = {key: torch.cat([x, x[:, :2]], 1) for key, x in architecture.inputs().items()}  # 8 tokens
    causal = not type(model).__name__.endswith("ForMaskedLM")
    with AllInFloat64():
        loss = model(**inputs).loss
        loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}

    def rank() -> None:
        local = swap(copy.deepcopy(model))
        local.zero_grad()
        part = nxd.get_batch_on_this_context_parallel_rank(inputs, "zigzag", causal=causal)
        with AllInFloat64():
            if architecture.name == "DistilBERT":
                with pytest.raises(ValueError, match="the model passes no position_ids to its attention: use cp=1"):
                    local(**part)
                return
            share = local(**part).loss
            share.backward()
        nxd.reduce_gradients(local)
        found = full_state_dict(local, gradients=True)
        assert error(comm.all_reduce(share.detach(), "cp") / 2, loss.detach()) < 1e-10
        for name, gradient in gradients.items():
            difference = (found[name] - gradient).norm().item()
            assert min(error(found[name], gradient), difference / 1e-3) < 1e-10, name  # a key's bias: 0 up to rounding

    comm.threads.run(Mesh(2, cp=2), rank)

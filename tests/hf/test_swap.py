"""A swapped model computes what Hugging Face's does in one process: loss, logits and every gradient; and it costs
what it should.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import full_state_dict, swap, transformer_layer_class
from neuronx_dist.hf.plan_reading import read_plan
from neuronx_dist.mesh import Mesh
from neuronx_dist.modules.lora import LoraConfig, get_lora_model
from neuronx_dist.planning.plan import Plan
from neuronx_dist.program import recorder as trace
from neuronx_dist.spmd import spec_of
from neuronx_dist.spmd.random import manual_seed
from tests.hf.models import (
    SIZES,
    VOCAB,
    batch,
    error,
    llama_config,
    meta_model,
    reference_loss,
    reference_model,
    run_reference,
    sum_partial_gradients,
    swapped,
)

pytestmark = pytest.mark.slow

TOLERANCE = 1e-10

CASES = [
    # tp, query heads, kv heads, tied, sequence parallel, pad heads
    (1, 4, 2, False, False, False),
    (1, 4, 2, True, True, False),
    (2, 4, 2, False, False, False),
    (2, 4, 2, True, False, False),
    (2, 4, 2, False, True, False),
    (2, 4, 2, True, True, False),
    (2, 9, 3, False, False, True),
    (2, 9, 3, True, True, True),
    (4, 4, 4, False, True, False),
    (4, 8, 4, True, False, False),
    (4, 4, 2, False, True, True),
    (3, 6, 3, False, False, False),
    # fewer key/value heads than ranks: each is on several; with padding inside of every group
    (2, 4, 1, False, False, False),
    (2, 4, 1, True, True, False),
    (4, 8, 2, False, False, False),
    (4, 8, 2, False, True, False),
    (4, 4, 1, True, False, False),
    (4, 4, 1, False, True, False),
    (4, 6, 2, False, True, True),  # groups of 3 become 4
    (4, 3, 1, False, False, True),
    (4, 3, 3, False, False, True),
    (6, 9, 3, True, True, True),  # 12 query heads over 3, each on 2 ranks
    (8, 9, 3, False, False, True),  # 16 over 4, each on 2 ranks
]


def _train_step(config: Any, state: Any, ids: Any, labels: Any, model_class: Any, options: Any) -> Any:
    model = swapped(config, state, model_class, **options)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    output = model(input_ids=ids, labels=labels)
    output.loss.backward()
    sum_partial_gradients(model)
    return output.loss.detach(), logits, full_state_dict(model, gradients=True), output.logits.shape


def _compare(config: Any, tp: int, model_class: Any = LlamaForCausalLM, **options: Any) -> None:
    reference = reference_model(config, model_class)
    ids, labels = batch(seq=12)
    loss, logits, gradients = run_reference(reference, ids, labels)
    results = threads.run(
        Mesh(tp, tp=tp), _train_step, config, reference.state_dict(), ids, labels, model_class, options
    )
    for rank_loss, rank_logits, rank_gradients, local_shape in results:
        assert error(rank_loss, loss) < TOLERANCE
        assert error(rank_logits, logits) < TOLERANCE
        assert local_shape == (*ids.shape, VOCAB // tp)
        assert rank_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert error(rank_gradients[name], gradient) < TOLERANCE, name


@pytest.mark.parametrize("tp,heads,kv_heads,tied,sequence_parallel,pad_heads", CASES)
def test_same_as_one_process(
    tp: int, heads: int, kv_heads: int, tied: bool, sequence_parallel: bool, pad_heads: bool
) -> None:
    _compare(llama_config(heads, kv_heads, tied=tied), tp, sequence_parallel=sequence_parallel, pad_heads=pad_heads)


WORDS = {
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    **{f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
    **{f"model.layers.*.{name}_proj": "rowwise" for name in ("self_attn.o", "mlp.down")},
}


@pytest.mark.parametrize("form", ["words", "layers", "plan"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_plan_that_is_given(form: str, sequence_parallel: bool, tmp_path: Any, monkeypatch: Any) -> None:
    """The plan is of an architecture that nobody else has a plan for."""
    config = llama_config(4, 2)
    layers = read_plan(meta_model(config)).layers(meta_model(config), 2, sequence_parallel=sequence_parallel)
    Plan(tp=2, layers=tuple(layers)).save(tmp_path / "plan.json")
    plan = {"words": WORDS, "layers": layers, "plan": Plan.load(tmp_path / "plan.json")}[form]
    monkeypatch.setattr(LlamaForCausalLM, "tp_plan", {"nothing": "colwise"})
    _compare(config, 2, plan=plan, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_loss_that_writes_over_the_logits(tp: int) -> None:
    _compare(llama_config(4, 2), tp, inplace_logits=True)


@pytest.mark.parametrize("inplace_logits", [False, True])
def test_logits_that_come_with_a_loss_are_kept_unless_they_are_given_up(inplace_logits: bool) -> None:
    config = llama_config(4, 2)
    reference, (ids, labels) = reference_model(config), batch(seq=12)
    with torch.no_grad():
        expected = reference(input_ids=ids).logits

    def rank() -> bool:
        model = swapped(config, reference.state_dict(), inplace_logits=inplace_logits, fused_loss=False)
        output = model(input_ids=ids, labels=labels)
        output.loss.backward()
        return error(output.logits.detach(), expected) < TOLERANCE

    assert threads.run(Mesh(1), rank) == [not inplace_logits]
    with pytest.raises(ValueError, match="is already swapped"):
        threads.run(Mesh(1), lambda: swap(swap(meta_model(config), inplace_logits=inplace_logits)))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp, heads", [(2, (9, 3)), (4, (6, 2))])
def test_biases(tp: int, heads: tuple[int, int], sequence_parallel: bool) -> None:
    config = llama_config(*heads, attention_bias=True, mlp_bias=True)
    _compare(config, tp, sequence_parallel=sequence_parallel, pad_heads=True)


class _UnlikeBiases(LlamaForCausalLM):
    """q and v have a bias, and k has none."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.k_proj.bias = None


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_siblings_with_unlike_biases_are_not_fused(sequence_parallel: bool) -> None:
    _compare(llama_config(attention_bias=True), 2, _UnlikeBiases, sequence_parallel=sequence_parallel)


@pytest.mark.each_pair
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4])  # of 2 key/value heads
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "mistral", "granite", "starcoder2", "stablelm"])
def test_other_architectures(architecture: str, tp: int, sequence_parallel: bool, monkeypatch: Any) -> None:
    from transformers import AutoConfig
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    def norm(self: Any, x: torch.Tensor) -> torch.Tensor:  # Hugging Face's rounds to float32 in the middle
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", norm)
    config = AutoConfig.for_model(
        architecture,
        **SIZES,
        num_hidden_layers=2,
        head_dim=8,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        pad_token_id=None,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        residual_dropout=0.0,
        embedding_dropout=0.0,
    )
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config))
    _compare(config, tp, model_class, sequence_parallel=sequence_parallel)


def test_swaps_a_real_model() -> None:
    """A model that has weights already keeps them, sliced, ties included, and frozen parameters stay frozen."""
    reference = reference_model(llama_config(tied=True))
    reference.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    ids, labels = batch()
    with torch.no_grad():
        expected = reference(input_ids=ids).logits

    def rank() -> None:
        model = swap(copy.deepcopy(reference))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert not model.model.layers[0].mlp.up_proj.weight.requires_grad
        assert error(model(input_ids=ids).logits, expected) < TOLERANCE
        for name, full in full_state_dict(model).items():
            assert torch.equal(full, reference.state_dict()[name]), name

    threads.run(Mesh(2, tp=2), rank)


def _counts(config: Any, state: Any, ids: Any, labels: Any, options: Any) -> Any:
    model = swapped(config, state, **options)
    with comm.record() as forward:
        loss = model(input_ids=ids, labels=labels).loss
    with comm.record() as backward:
        loss.backward()
    return [Counter(call.verb for call in calls) for calls in (forward, backward)]


def test_collectives_of_a_layer() -> None:
    """From one layer more: two all-reduces forward, two backward; with sequence parallelism a gather and a scatter
    for each.
    """
    ids, labels = batch()

    def per_layer(**options: Any) -> list[Counter[str]]:
        counts = []
        for layers in (1, 2):
            config = llama_config(layers=layers)
            state = reference_model(config).state_dict()
            counts.append(threads.run(Mesh(2, tp=2), _counts, config, state, ids, labels, options)[0])
        return [two - one for one, two in zip(*counts)]

    assert per_layer() == [Counter(all_reduce=2), Counter(all_reduce=2)]
    both = Counter(all_gather=2, reduce_scatter=2)
    assert per_layer(sequence_parallel=True) == [both, both]


def test_collectives_outside_the_layers() -> None:
    ids, labels = batch()
    config = llama_config(layers=1)
    state = reference_model(config).state_dict()
    forward, backward = threads.run(Mesh(2, tp=2), _counts, config, state, ids, labels, {})[0]
    assert forward == Counter(all_reduce=2 + 1 + 2)  # the layer, the embedding, the loss
    assert backward == Counter(all_reduce=2 + 1)  # the layer, the head's input


def test_without_labels_the_logits_carry_gradients() -> None:
    """A loss of one's own on the full logits: every rank computes it whole, and the gradients are not multiplied by
    tp.
    """
    config = llama_config()
    reference = reference_model(config)
    ids, labels = batch()
    _, _, gradients = run_reference(reference, ids, labels)

    def rank() -> Any:
        model = swapped(config, reference.state_dict())
        reference_loss(model(input_ids=ids).logits, labels).backward()
        return full_state_dict(model, gradients=True)

    for name, gradient in threads.run(Mesh(2, tp=2), rank)[0].items():
        assert error(gradient, gradients[name]) < TOLERANCE, name


def test_tuple_outputs() -> None:
    config = llama_config()
    state = reference_model(config).state_dict()
    ids, labels = batch()

    def rank() -> None:
        model = swapped(config, state)
        (logits,) = model(input_ids=ids, return_dict=False)
        assert logits.shape == (*ids.shape, VOCAB)
        loss, local = model(input_ids=ids, labels=labels, return_dict=False)
        assert loss.ndim == 0 and local.shape == (*ids.shape, VOCAB // 2)
        logits, cache = model(input_ids=ids, return_dict=False, use_cache=True)
        assert logits.shape == (*ids.shape, VOCAB) and cache.get_seq_length() == ids.shape[1]

    threads.run(Mesh(2, tp=2), rank)


def test_state_dict_names_are_hugging_faces() -> None:
    config = llama_config(tied=True)
    names = list(reference_model(config).state_dict())
    assert threads.run(Mesh(2, tp=2), lambda: list(swap(meta_model(config)).state_dict())) == [names, names]


def test_padding_gets_no_gradient_and_stays_zero() -> None:
    """Under AdamW with weight decay; and what is not padding moves as in one process."""
    config = llama_config(9, 3)
    reference = reference_model(config)
    state = copy.deepcopy(reference.state_dict())
    ids, labels = batch()
    options: Any = dict(lr=1e-2, weight_decay=0.1, eps=1e-6)
    optimizer = torch.optim.AdamW(reference.parameters(), **options)
    for _ in range(3):
        run_reference(reference, ids, labels)
        optimizer.step()

    def rank() -> Any:
        model = swapped(config, state, pad_heads=True)
        attention = model.model.layers[0].self_attn
        assert attention.q_proj.weight.shape == (6 * 8, 72) and attention.k_proj.weight.shape == (2 * 8, 72)
        optimizer = torch.optim.AdamW(model.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            model(input_ids=ids, labels=labels).loss.backward()
            if comm.rank("tp") == 1:  # 12 query heads over 4: the last 3 and the last 1 are padding
                for layer in model.model.layers:
                    for projection, heads in (
                        (layer.self_attn.q_proj, 3),
                        (layer.self_attn.k_proj, 1),
                        (layer.self_attn.v_proj, 1),
                    ):
                        assert not projection.weight.grad[-heads * 8 :].any()
                        assert projection.weight.grad[: -heads * 8].any()
                    assert not layer.self_attn.o_proj.weight.grad[:, -3 * 8 :].any()
            optimizer.step()
        if comm.rank("tp") == 1:
            assert not model.model.layers[1].self_attn.q_proj.weight[-3 * 8 :].any()
            assert not model.model.layers[1].self_attn.o_proj.weight[:, -3 * 8 :].any()
        return full_state_dict(model)

    for name, weight in threads.run(Mesh(2, tp=2), rank)[0].items():
        assert error(weight, reference.state_dict()[name]) < 1e-8, name


def test_sequence_parallel_marks_replicated_parameters() -> None:
    config = llama_config()

    def rank() -> Any:
        model = swap(meta_model(config), sequence_parallel=True)
        return {name for name, param in model.named_parameters() if spec_of(param).sequence_parallel}

    marked = threads.run(Mesh(2, tp=2), rank)[0]
    assert marked == {name for name, _ in meta_model(config).named_parameters() if "norm" in name}


def test_a_sequence_that_tp_does_not_divide() -> None:
    config = llama_config()
    state = reference_model(config).state_dict()
    ids, labels = batch(seq=7)
    with pytest.raises(ValueError, match="7 tokens is not divisible by tp=2"):
        threads.run(Mesh(2, tp=2), lambda: swapped(config, state, sequence_parallel=True)(input_ids=ids, labels=labels))


@pytest.mark.parametrize("positions", [1, torch.tensor([0]), torch.tensor([0, 3])])
def test_logits_to_keep_under_sequence_parallelism_is_refused(positions: Any) -> None:
    config = llama_config()
    state = reference_model(config).state_dict()
    ids, _ = batch()
    with pytest.raises(ValueError, match="logits_to_keep"):
        threads.run(
            Mesh(2, tp=2),
            lambda: swapped(config, state, sequence_parallel=True)(input_ids=ids, logits_to_keep=positions),
        )


def test_generate() -> None:
    config = llama_config(tied=True)
    reference = reference_model(config, dtype=torch.float32)
    ids, _ = batch()
    expected = reference.generate(ids, max_new_tokens=6, do_sample=False)

    def rank() -> Any:
        return swapped(config, reference.state_dict()).generate(ids, max_new_tokens=6, do_sample=False)

    for tokens in threads.run(Mesh(2, tp=2), rank):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_pipeline_can_record_it(sequence_parallel: bool) -> None:
    """On meta, with labels and without; transformer layers are leaves, hooks inside them."""
    config = llama_config()
    ids, labels = batch()

    def rank() -> None:
        model = swap(meta_model(config), sequence_parallel=sequence_parallel)
        assert transformer_layer_class(model).__name__ == "LlamaDecoderLayer"
        for inputs in ({"input_ids": ids, "labels": labels}, {"input_ids": ids}):
            recording = trace.record(model, inputs, [transformer_layer_class(model)])
            called = [str(node.target) for node in recording.calls()]
            layers = [f"model.layers.{i}" for i in range(2)]
            assert called == ["model.embed_tokens", *layers, "model.norm", "lm_head"]

    threads.run(Mesh(2, tp=2), rank)


# Dropout


def test_attention_dropout_differs_over_tp_and_nothing_else_does() -> None:
    """Each rank drops its own heads' weights from its own stream; the stream that all ranks share is not touched."""
    config = llama_config(heads=4, kv_heads=4, layers=1, attention_dropout=0.5)
    state = reference_model(config).state_dict()
    for projection in "qkv":  # all heads alike, so that only the masks can differ
        weight = state[f"model.layers.0.self_attn.{projection}_proj.weight"]
        weight.copy_(weight[:8].repeat(4, 1))
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def rank() -> Any:
        model = swapped(config, state)
        rotary = model.model.rotary_emb(x, torch.arange(6).unsqueeze(0))
        manual_seed(7)
        shared = torch.get_rng_state()
        heads: list[torch.Tensor] = []
        for attention, training in ((model, True), (copy.deepcopy(model), False), (model, False)):
            attention = attention.train(training).model.layers[0].self_attn
            with torch.no_grad():
                attention.o_proj.register_forward_pre_hook(lambda module, args: heads.append(args[0]))
                attention(hidden_states=x, position_embeddings=rotary, attention_mask=None)
        assert torch.equal(torch.get_rng_state(), shared)
        return heads

    # One after the other: threads share torch's generator, which processes do not.
    mesh = Mesh(2, tp=2)
    results = [_alone(mesh, index, rank) for index in range(2)]
    (dropped_0, whole_0), (dropped_1, whole_1) = ([r[0], r[-1]] for r in results)
    assert error(whole_1, whole_0) < TOLERANCE
    assert error(dropped_1, dropped_0) > 0.1
    assert error(dropped_0[..., :8], dropped_0[..., 8:]) > 0.1


def test_attention_dropout_at_tp_1_is_hugging_faces() -> None:
    """Attention dropout draws from torch's stream, which no one had to seed for us."""
    config = llama_config(attention_dropout=0.5, attn_implementation="eager")
    reference = reference_model(config).train()
    ids, _ = batch()

    def rank() -> Any:
        model = swapped(config, reference.state_dict()).train()
        results = []
        for each in (reference, model):
            torch.manual_seed(3)
            results.append(each(input_ids=ids).logits)
        return results

    expected, logits = threads.run(Mesh(1), rank)[0]
    assert error(logits, expected) < TOLERANCE
    assert error(reference.eval()(input_ids=ids).logits, expected) > 0.01


def test_a_row_layer_in_evaluation_ends_what_columns_have_begun() -> None:
    """The residual's dropout behind it draws from the stream that all ranks share."""
    rates = dict(attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.0)
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=8, vocab_size=32, **rates)
    with comm.as_rank(Mesh(2, tp=2), 0):
        attention = swap(GPT2LMHeadModel(config)).train().transformer.h[0].attn
        attention.c_proj.eval()
        manual_seed(1)
        before = torch.get_rng_state()
        attention(torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(torch.get_rng_state(), before)


def test_adapters_on_layers_beside_attention_dropout() -> None:
    config = llama_config(heads=4, kv_heads=4, layers=1, attention_dropout=0.1)
    state = reference_model(config).state_dict()
    with comm.as_rank(Mesh(2, tp=2), 0):
        adapted = get_lora_model(swapped(config, state), LoraConfig(target_modules=["q_proj", "o_proj"]))
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 2


def test_evaluation_with_attention_dropout_needs_no_seed() -> None:
    config = llama_config(attention_dropout=0.5)
    reference = reference_model(config).eval()
    ids, _ = batch()
    with torch.no_grad():
        expected = reference(input_ids=ids).logits
    for logits in threads.run(
        Mesh(2, tp=2), lambda: swapped(config, reference.state_dict()).eval()(input_ids=ids).logits
    ):
        assert error(logits, expected) < TOLERANCE


def _alone(mesh: Mesh, index: int, fn: Any) -> Any:
    """Returns the result of `fn` on one rank, whose collectives give tensors of the right shape."""
    with comm.as_rank(mesh, index):
        return fn()

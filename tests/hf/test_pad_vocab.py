"""A vocabulary that tp does not divide, padded: what one process computes, and no trace of the padding outside."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import neuronx_dist as nxd
from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import (
    full_state_dict,
    load_pretrained,
    materialize,
    save_pretrained,
    swap,
    transformer_layer_class,
)
from neuronx_dist.mesh import Mesh
from neuronx_dist.optimizer import NeuronZero1Optimizer
from neuronx_dist.sharded_functions.vocabulary import hide_padding
from tests.hf.models import (
    SIZES,
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

VOCAB = 97  # at tp=2 one row of padding, at tp=4 three, at tp=60 more than a rank holds
TOLERANCE = 1e-10
LEARNING_RATE = 0.1


def _config(vocab: int = VOCAB, tied: bool = False, **more: Any) -> Any:
    config = llama_config(kv_heads=4, tied=tied, **more)
    config.vocab_size = vocab
    return config


def _bound_logits(model: Any) -> Any:
    """Bounds logits as Gemma does: -inf would become a number again."""
    model.get_output_embeddings().register_forward_hook(lambda head, args, logits: 2 * torch.tanh(logits / 2))
    return model


def _as_it_is(model: Any) -> Any:
    return model


def _reference(
    config: Any, ids: Any, labels: Any, steps: int, model_class: Any = LlamaForCausalLM, change: Any = _as_it_is
) -> Any:
    """The model before, and losses, logits, gradients and weights after SGD steps."""
    before = reference_model(config, model_class)
    model = change(copy.deepcopy(before))
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    results = []
    for _ in range(steps):
        results.append(run_reference(model, ids, labels))
        optimizer.step()
    return before, results, {name: param.detach() for name, param in model.named_parameters()}


def _compare(
    config: Any,
    tp: int,
    model_class: Any = LlamaForCausalLM,
    steps: int = 3,
    change: Any = _as_it_is,
    **options: Any,
) -> None:
    ids, labels = batch(seq=12)
    before, results, weights = _reference(config, ids, labels, steps, model_class, change)

    def rank() -> None:
        model = change(swapped(config, before.state_dict(), model_class, pad_vocab=True, **options))
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
        for loss, logits, gradients in results:
            with torch.no_grad():
                assert error(model(input_ids=ids).logits, logits) < TOLERANCE
            output = model(input_ids=ids, labels=labels)
            padding = -config.vocab_size % tp
            every = comm.all_gather(output.logits.detach(), "tp", dim=-1)
            assert every.shape[-1] == config.vocab_size + padding
            assert (every[..., config.vocab_size :] == -torch.inf).all()
            optimizer.zero_grad()
            output.loss.backward()
            sum_partial_gradients(model)
            assert error(output.loss.detach(), loss) < TOLERANCE
            whole = full_state_dict(model, gradients=True)
            assert whole.keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert error(whole[name], gradient) < TOLERANCE, name
            optimizer.step()
        for name, weight in full_state_dict(model).items():
            assert error(weight, weights[name]) < TOLERANCE, name
        for table in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            rows = comm.all_gather(table.detach(), "tp", dim=0)
            assert not rows[config.vocab_size :].any()

    threads.run(Mesh(tp, tp=tp), rank)


@pytest.mark.each_pair
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_same_as_one_process(tp: int, tied: bool, sequence_parallel: bool) -> None:
    _compare(_config(tied=tied), tp, sequence_parallel=sequence_parallel)


def test_a_vocabulary_that_needs_no_padding() -> None:
    _compare(_config(vocab=100, tied=True), 2, steps=1)


def test_padded_heads_too() -> None:
    config = llama_config(9, 3, tied=True)
    config.vocab_size = VOCAB
    _compare(config, 2, pad_heads=True)


@pytest.mark.slow
def test_logits_that_the_model_bounds_after_its_head() -> None:
    _compare(_config(), 4, change=_bound_logits)


@pytest.mark.parametrize("architecture,more", [("granite", dict(logits_scaling=3.0)), ("qwen2", {})])
def test_other_architectures(architecture: str, more: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {**SIZES, "vocab_size": VOCAB, "head_dim": 8, "max_position_embeddings": 64}
    options: dict[str, Any] = dict(num_hidden_layers=2, use_cache=False, initializer_range=0.2, attention_dropout=0.0)
    config = AutoConfig.for_model(architecture, **sizes, **options, **more, pad_token_id=None)
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config))
    _compare(config, 2, model_class, steps=1)


@pytest.mark.slow
def test_a_pipeline_with_zero1() -> None:
    """tp 2, pp 2, dp 2; the weight is tied over stages."""
    config = _config(tied=True)
    ids, labels = batch(batch_size=4, seq=12)
    before, results, weights = _reference(config, ids, labels, steps=3)

    def rank() -> None:
        model = nxd.NxDPPModel(
            swap(meta_model(config), sequence_parallel=True, pad_vocab=True, inplace_logits=True),
            transformer_layer_cls=transformer_layer_class(before),
            num_microbatches=2,
            output_loss_value_spec={"loss": True, "logits": False},
            auto_partition=True,
            broadcast_and_average_loss=True,
            use_zero1_optimizer=True,
        )
        load_pretrained(model, before.state_dict())
        optimizer = NeuronZero1Optimizer(
            model.local_parameters(), torch.optim.SGD, lr=LEARNING_RATE, momentum=0.9, grad_clipping=False
        )
        mine, own_labels = (rows.chunk(2)[comm.rank("dp")] for rows in (ids, labels))
        items = nxd.global_num_items(own_labels, 2, dtype=torch.float64)
        for loss, _, _ in results:
            got = model.run_train(input_ids=mine, labels=own_labels, num_items_in_batch=items)
            assert error(got.detach(), loss) < TOLERANCE
            optimizer.step()
            optimizer.zero_grad()
        for name, weight in full_state_dict(model).items():
            assert error(weight, weights[name]) < TOLERANCE, name

    threads.run(Mesh(8, tp=2, pp=2), rank)


def test_a_loss_of_ones_own_on_the_full_logits() -> None:
    config = _config()
    ids, labels = batch()
    before, [(_, _, gradients)], _ = _reference(config, ids, labels, steps=1)

    def rank() -> Any:
        model = swapped(config, before.state_dict(), pad_vocab=True)
        reference_loss(model(input_ids=ids).logits, labels).backward()
        return full_state_dict(model, gradients=True)

    for name, gradient in threads.run(Mesh(4, tp=4), rank)[0].items():
        assert error(gradient, gradients[name]) < TOLERANCE, name


@pytest.mark.parametrize("tp", [2, 4])
def test_smoothed_labels(tp: int) -> None:
    """The smoothing is over the real vocabulary; whether the padding is -inf already, or a number and `vocab_size`."""
    smoothing = 0.1
    config = _config()
    ids, _ = batch()
    labels = ids.roll(-1, 1)
    before = reference_model(config)
    share = smoothing * VOCAB / (VOCAB - 1)
    loss = nn.functional.cross_entropy(
        before(input_ids=ids).logits.flatten(0, 1), labels.flatten(), label_smoothing=share
    )
    loss.backward()

    def rank() -> Any:
        results = []
        for vocab_size in (None, VOCAB):
            model = swapped(config, before.state_dict(), pad_vocab=True)
            if vocab_size is None:
                logits = model(input_ids=ids, labels=labels).logits
            else:
                logits = model.lm_head(model.model(input_ids=ids).last_hidden_state)
            losses = nxd.parallel_cross_entropy(logits, labels, smoothing, vocab_size=vocab_size)
            losses.mean().backward()
            results.append((losses.mean().detach(), full_state_dict(model, gradients=True)))
        assert comm.rank("tp") < tp - 1 or not logits[..., -1].any()  # they are left as they are
        return results

    for got, gradients in threads.run(Mesh(tp, tp=tp), rank)[0]:
        assert error(got, loss.detach()) < TOLERANCE
        for name, param in before.named_parameters():
            assert error(gradients[name], param.grad) < TOLERANCE, name


def test_labels_of_the_padding_are_refused() -> None:
    labels = torch.full((1,), VOCAB)
    with pytest.raises(IndexError, match=f"label {VOCAB} is outside the vocabulary of {VOCAB}"):
        threads.run(Mesh(2, tp=2), lambda: nxd.parallel_cross_entropy(torch.zeros(1, 49), labels, vocab_size=VOCAB))

    config = _config()
    state = reference_model(config).state_dict()
    inputs = dict(input_ids=torch.zeros(1, 2, dtype=torch.long), labels=torch.tensor([[0, VOCAB]]))
    with pytest.raises(IndexError, match=f"label {VOCAB} is outside the vocabulary of {VOCAB}"):
        threads.run(Mesh(2, tp=2), lambda: swapped(config, state, pad_vocab=True)(**inputs))


@pytest.mark.slow
def test_folders_have_the_real_size(tmp_path: Path) -> None:
    """Folder -> tp 4 -> folder -> transformers; and initial weights do not depend on the padding."""
    reference = reference_model(_config(), dtype=torch.float32)
    reference.save_pretrained(tmp_path / "in")

    def rank(source: Any) -> Any:
        model = swap(meta_model(reference.config, dtype=torch.float32), pad_vocab=True)
        save_pretrained(load_pretrained(model, source), tmp_path / "out")
        again = swap(meta_model(reference.config, dtype=torch.float32), pad_vocab=True)
        return full_state_dict(materialize(again, seed=1))

    drawn = [threads.run(Mesh(tp, tp=tp), rank, tmp_path / "in")[0] for tp in (1, 4)]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.lm_head.weight.shape == (VOCAB, 32)
    for name, weight in reference.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
        assert torch.equal(drawn[0][name], drawn[1][name]), name


def test_generate_never_gives_padding() -> None:
    """All real logits are negative, where a padded one would be 0, and no two are equal: rounding decides nothing."""
    config = _config()
    reference = reference_model(config, dtype=torch.float32)
    ids, _ = batch()
    with torch.no_grad():
        away = -reference.model(ids).last_hidden_state.mean(dim=(0, 1))  # from where the hidden states are
        reference.lm_head.weight.copy_(torch.linspace(1.0, 2.0, VOCAB)[:, None] * away)
    drawn = reference.generate(ids, max_new_tokens=4, do_sample=False, output_scores=True, return_dict_in_generate=True)
    expected = drawn.sequences
    assert all(scores.max() < 0 and scores.diff(dim=-1).abs().min() > 1e-3 for scores in drawn.scores)

    def rank() -> Any:
        model = swapped(config, reference.state_dict(), pad_vocab=True)
        return model.generate(ids, max_new_tokens=4, do_sample=False)

    for tokens in threads.run(Mesh(4, tp=4), rank):
        assert torch.equal(tokens, expected)


def test_ids_of_the_padding_are_refused() -> None:
    config = _config()
    state = reference_model(config).state_dict()
    with pytest.raises(IndexError, match=f"id {VOCAB} is outside the vocabulary of {VOCAB}"):
        threads.run(Mesh(2, tp=2), lambda: swapped(config, state, pad_vocab=True)(input_ids=torch.tensor([[VOCAB]])))


def test_without_pad_vocab_the_refusal_names_it() -> None:
    with pytest.raises(ValueError, match=r"vocabulary of 97 is not divisible by tp=4: pass pad_vocab=True, .* 3 zero"):
        threads.run(Mesh(4, tp=4), lambda: swap(meta_model(_config())))


@pytest.mark.parametrize("vocab", [5, 7, 9])
def test_padding_of_several_ranks(vocab: int) -> None:
    """5 ids over 4 ranks are 2, 2, 1 and 0 of 2 columns each."""

    def rank() -> Any:
        local = -(-vocab // 4)
        logits = torch.zeros(3, local)
        assert hide_padding(logits, vocab) is logits
        with pytest.raises(ValueError, match=rf"the shard of a vocabulary of {vocab} over 4 ranks"):
            hide_padding(torch.zeros(3, local + 1), vocab)
        return comm.all_gather(logits, "tp", dim=-1)

    every = threads.run(Mesh(4, tp=4), rank)[0]
    assert torch.equal(every[0] == 0, torch.arange(every.shape[-1]) < vocab)


def test_the_embedding_and_an_untied_head_may_differ_in_size() -> None:
    """A head of more rows than the embedding; each is padded by itself."""
    config = _config()

    def rank() -> None:
        model = meta_model(config)
        model.lm_head = nn.Linear(32, 99, bias=False, device="meta", dtype=torch.float64)
        state = {name: torch.zeros(param.shape) for name, param in model.named_parameters()}
        loaded = load_pretrained(swap(model, pad_vocab=True), state)
        assert loaded.model.embed_tokens.weight.shape == loaded.lm_head.weight.shape == ((25, 32))
        assert loaded(input_ids=torch.tensor([[1]])).logits.shape == (1, 1, 99)

    threads.run(Mesh(4, tp=4), rank)

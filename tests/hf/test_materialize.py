"""Hugging Face models materialised from a seed: their own initialisers, any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import full_state_dict, materialize, swap
from neuronx_dist.mesh import Mesh
from tests.hf.models import llama_config, meta_model


def _weights(tp: int, config: Any, **options: Any) -> dict[str, torch.Tensor]:
    def rank() -> Any:
        return full_state_dict(materialize(swap(meta_model(config, dtype=torch.float32), **options), seed=1))

    return threads.run(Mesh(tp, tp=tp), rank)[0]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.slow
def test_equal_at_any_layout(tied: bool) -> None:
    config = llama_config(tied=tied, attention_bias=True, pad_token_id=3)
    whole = _weights(1, config)
    for tp, options in ((2, {}), (4, {}), (8, dict(pad_heads=True)), (2, dict(sequence_parallel=True))):
        split = _weights(tp, config, **options)
        assert split.keys() == whole.keys()
        for name, weight in whole.items():
            assert torch.equal(split[name], weight), name


def test_an_unswapped_model_gets_the_same() -> None:
    config = llama_config()
    swapped = _weights(2, config)
    plain = threads.run(Mesh(1), lambda: full_state_dict(materialize(meta_model(config, dtype=torch.float32), seed=1)))[
        0
    ]
    for name, weight in swapped.items():
        assert torch.equal(plain[name], weight), name


def test_distributions_are_hugging_faces() -> None:
    config = llama_config(pad_token_id=3, attention_bias=True)  # initializer_range=0.2
    weights = _weights(2, config)
    for name, weight in weights.items():
        if "norm" in name:
            assert bool((weight == 1).all()), name
        elif name.endswith("bias"):
            assert not weight.any(), name
        else:
            assert abs(weight.mean()) < 0.03 and 0.17 < weight.std() < 0.23, name
    assert not weights["model.embed_tokens.weight"][3].any()


def test_rotary_buffers_are_real() -> None:
    config = llama_config()

    def rank() -> Any:
        rotary = materialize(swap(meta_model(config, dtype=torch.float32)), seed=1).model.rotary_emb
        return rotary.inv_freq, rotary.original_inv_freq

    expected = 1.0 / 10000.0 ** (torch.arange(0, 8, 2) / 8)
    for buffer in threads.run(Mesh(2, tp=2), rank)[1]:
        torch.testing.assert_close(buffer, expected)


def test_padding_is_zero() -> None:
    config = llama_config(9, 3)

    def rank() -> Any:
        attention = materialize(swap(meta_model(config), pad_heads=True), seed=1).model.layers[0].self_attn
        return attention.q_proj.weight, attention.o_proj.weight

    q, o = threads.run(Mesh(2, tp=2), rank)[1]
    assert q[: 3 * 8].any() and not q[3 * 8 :].any()
    assert o[:, : 3 * 8].any() and not o[:, 3 * 8 :].any()


def test_weights_that_a_parent_initialises() -> None:
    """T5's attention sets its children's weights, to standard deviations far from those of `nn.Linear`."""
    sizes = dict(d_model=256, d_kv=32, num_heads=8, d_ff=512, num_layers=1, vocab_size=128)
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)
    torch.manual_seed(0)
    expected = transformers.T5ForConditionalGeneration(config).state_dict()
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    names = ("SelfAttention.q", "SelfAttention.o", "DenseReluDense.wi", "DenseReluDense.wo")
    (found,) = threads.run(Mesh(1), lambda: full_state_dict(materialize(model, seed=1)))
    compared = [name for name in expected if name.removesuffix(".weight").endswith(names)]
    assert len(compared) == 8
    for name in compared:
        assert abs(found[name].std() / expected[name].std() - 1) < 0.05, name

"""The vocabulary-parallel loss against cross entropy on whole logits, with Hugging Face's signature and edge cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from neuronx_dist import comm
from neuronx_dist.comm.backends import threads
from neuronx_dist.hf import causal_lm_loss
from neuronx_dist.mesh import Mesh

VOCAB = 12


def _data(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 5, VOCAB, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (2, 5), generator=generator)
    labels[0, 2] = labels[1, 0] = -100
    return logits, labels


def _parallel(tp: int, logits: torch.Tensor, labels: torch.Tensor | None, **options: Any) -> list[Any]:
    def rank() -> Any:
        local = logits.chunk(tp, -1)[comm.rank("tp")].clone().requires_grad_()
        loss = causal_lm_loss(local, labels, vocab_size=VOCAB, **options)
        loss.backward()
        return loss.detach(), local.grad

    return threads.run(Mesh(tp, tp=tp), rank)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    "options", [{}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(2.5)}, {"ignore_index": 3}]
)
def test_same_as_hugging_face(tp: int, options: dict[str, Any]) -> None:
    logits, labels = _data()
    if "ignore_index" in options:
        labels = labels.clamp(min=0)
    whole = logits.clone().requires_grad_()
    expected = ForCausalLMLoss(whole, labels, VOCAB, **options)
    expected.backward()
    results = _parallel(tp, logits, labels, **options)
    for loss, _ in results:
        assert loss.ndim == 0
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(torch.cat([gradient for _, gradient in results], -1), whole.grad, rtol=1e-5, atol=1e-7)


def test_shifted_labels() -> None:
    logits, labels = _data()
    shifted = torch.cat([labels[:, 1:], torch.full((2, 1), -100)], 1)
    assert torch.equal(_parallel(2, logits, None, shift_labels=shifted)[0][0], _parallel(2, logits, labels)[0][0])


@pytest.mark.parametrize("items", [None, 0, torch.tensor(0)])
def test_no_valid_label_gives_zero(items: Any) -> None:
    """Not NaN, as Hugging Face's mean over nothing."""
    logits, labels = _data()
    for loss, gradient in _parallel(2, logits, torch.full_like(labels, -100), num_items_in_batch=items):
        assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("items", [None, 4])
def test_a_batch_without_rows_gives_zero(tp: int, items: Any) -> None:
    logits, labels = _data()
    for loss, gradient in _parallel(tp, logits[:0], labels[:0], num_items_in_batch=items):
        assert loss == 0 and gradient.shape == (0, *logits.shape[1:-1], logits.shape[-1] // tp)


def test_low_precision_logits_are_computed_in_float32() -> None:
    logits, labels = _data(torch.bfloat16)
    loss, gradient = _parallel(2, logits, labels)[0]
    torch.testing.assert_close(loss, ForCausalLMLoss(logits, labels, VOCAB), rtol=1e-6, atol=1e-6)
    assert loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16


def test_labels_are_needed() -> None:
    with pytest.raises(ValueError, match="labels or shift_labels"):
        causal_lm_loss(torch.zeros(1, 2, VOCAB), None, VOCAB)

"""A batch in microbatches: which batches one recording serves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neuronx_dist.pipeline.run.microbatches import Batch

X = torch.arange(24.0).view(4, 6)


def key(x: Any, count: int = 2) -> Any:
    return Batch({"x": x}, None, count).key()


@pytest.mark.parametrize(
    "other",
    [X[:2], X[:, :3], X.view(4, 2, 3), X.view(6, 4).t(), X.double(), X.clone().requires_grad_(), None, 4],
)
def test_the_key_is_that_of_a_microbatch(other):
    assert key(X) == key(X + 1) == key(X.clone()) != key(other)
    assert key(other) == key(other)


def test_more_rows_in_as_many_more_microbatches_have_one_key():
    assert key(X, 4) == key(X[:2], 2) == key(X[:1], 1) != key(X, 2)


def test_a_0_dim_tensor_goes_whole_to_every_microbatch():
    assert key(torch.tensor(1.0), 2) == key(torch.tensor(2.0), 4) != key(torch.ones(2), 2)

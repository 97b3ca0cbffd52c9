"""The smallest case for each collective call of `sharded_functions`: an AssertionError if the call is made wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from neuronx_dist.sharded_functions import norms
from neuronx_dist.sharded_functions.softmax import log_softmax
from tests.sharded_functions.shards import assert_like_whole, randn

__all__ = ["moments_of_shards", "rms_of_shards", "softmax_of_shards"]


def softmax_of_shards() -> None:
    """Logits beyond what exp can take, the largest of them on one rank: the maximum has to be the whole row's."""
    logits = randn(6, 8) * 2000
    logits[3:] -= 5000.0
    logits[0, :4] += 3000.0
    assert_like_whole(lambda x: log_softmax(x, 1, axis="tp"), lambda x: torch.log_softmax(x, 1), logits, 1, (5, 3))


def moments_of_shards() -> None:
    ours = lambda x: norms.layer_norm(x, 1, axis="tp", count=8)  # noqa: E731
    assert_like_whole(ours, lambda x: F.layer_norm(x, (8,)), randn(3, 8).exp(), 1, (4, 4))


def rms_of_shards() -> None:
    ours = lambda x: norms.rms_norm(x, 1, axis="tp", count=8)  # noqa: E731
    assert_like_whole(ours, lambda x: F.rms_norm(x, (8,)), randn(3, 8), 1, (4, 4))

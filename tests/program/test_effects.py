"""Effects of operators beside their results: how much they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neuronx_dist.program.effects import Effects


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_is_counted_as_its_two_matrix_products(has_mask: bool, key_heads: int) -> None:
    batch, heads, queries, keys, width = 2, 4, 3, 5, 8
    query = torch.randn(batch, heads, queries, width)
    key, value = torch.randn(2, batch, key_heads, keys, width)
    mask = torch.zeros(queries, keys) if has_mask else None
    with Effects() as effects:
        F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=key_heads != heads)
    assert effects.flops == 2 * (2 * batch * heads * queries * keys * width)

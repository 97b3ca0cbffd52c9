"""`without_float32_inside` changes norms that compute what Llama's does, and refuses others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tests.support.llama_training import without_float32_inside


@pytest.mark.parametrize("norm_class", [GptOssRMSNorm, MixtralRMSNorm, Qwen3RMSNorm])
def test_norms_are_computed_in_float64(norm_class: Any) -> None:
    norm, x = norm_class(6).double(), torch.randn(3, 6, dtype=torch.float64)
    norm.weight.data.normal_()
    in_float32 = norm(x)
    without_float32_inside(nn.Sequential(norm), torch.float64)
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight
    torch.testing.assert_close(norm(x), wanted, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(norm(x), in_float32, rtol=1e-5, atol=1e-6)


class ShiftedRMSNorm(Qwen3RMSNorm):
    """A norm times one plus the weight, with the attributes of Llama's."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(hidden_states)
        return result * (1 + 1 / self.weight)


@pytest.mark.parametrize("norm_class", [GemmaRMSNorm, ShiftedRMSNorm])
def test_other_norms_are_refused(norm_class: Any) -> None:
    with pytest.raises(TypeError, match=f"{norm_class.__name__} computes something else than LlamaRMSNorm"):
        without_float32_inside(nn.Sequential(norm_class(6)), torch.float64)

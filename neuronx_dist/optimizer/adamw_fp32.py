"""NxD's AdamW for low-precision models: parameters in bf16, masters and state in fp32."""

from __future__ import annotations

from typing import Any

import torch

from ..gradients.gradient import parameters_of

__all__ = ["AdamW_FP32OptimParams"]


class AdamW_FP32OptimParams(torch.optim.AdamW):
    """AdamW of fp32 masters, to be passed to `NeuronZero1Optimizer` or `MasterWeightsOptimizer`, which hold them.

    Raises:
        ValueError: a parameter is of lower precision: its moments, and small updates, would be lost.
    """

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        super().__init__(params, *args, **options)
        low = next((param for param in parameters_of(self) if param.dtype.itemsize < 4), None)
        if low is not None:
            raise ValueError(
                f"AdamW_FP32OptimParams got a parameter of {low.dtype}, but stores no fp32 copy of it: pass the "
                "class to a wrapper that does, MasterWeightsOptimizer(params, AdamW_FP32OptimParams, ...) or "
                "NeuronZero1Optimizer(params, AdamW_FP32OptimParams, ...)"
            )

"""NxD's AdamW for low-precision models: parameters in bf16, masters and state in fp32."""

from __future__ import annotations

from typing import Any

import torch

from ..gradients.gradient import parameters_of

__all__ = ["AdamW_FP32OptimParams"]


class AdamW_FP32OptimParams(torch.optim.AdamW):
    """AdamW of fp32 masters, to be passed to `NeuronZero1Optimizer` or `MasterWeightsOptimizer`, which hold them.

    The defaults are NxD's: no weight decay, eps 1e-6.

    Args:
        correct_bias: the moments are corrected for their start at zero; False is refused.
        no_deprecation_warning: has no effect; upstream's scripts pass it.
        options: other options of `torch.optim.AdamW`, such as `fused=`.

    Raises:
        ValueError: a parameter is of lower precision: its moments, and small updates, would be lost.
        NotImplementedError: `correct_bias` is False.

    Source: upstream's `utils/adamw_fp32_optim_params.py`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = True,
        **options: Any,
    ) -> None:
        if not correct_bias:
            raise NotImplementedError(
                "AdamW_FP32OptimParams(correct_bias=False) is not supported: its step is torch.optim.AdamW's, which "
                "corrects the moments for their start at zero. Leave it out; a warm-up of the learning rate, which "
                "such a configuration has, makes the first steps small in either case"
            )
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options)
        low = next((param for param in parameters_of(self) if param.dtype.itemsize < 4), None)
        if low is not None:
            raise ValueError(
                f"AdamW_FP32OptimParams got a parameter of {low.dtype}, but stores no fp32 copy of it: pass the "
                "class to a wrapper that does, MasterWeightsOptimizer(params, AdamW_FP32OptimParams, ...) or "
                "NeuronZero1Optimizer(params, AdamW_FP32OptimParams, ...)"
            )

"""NxD's import path of two questions about the weights of its GQA layer."""

from __future__ import annotations

import torch

from ..lazy_names import lazy_names

__all__ = ["check_requires_grad", "check_use_bias"]

_STEPS = "base_setup_fwd base_setup_bwd bwd_grad_reduce bwd_no_weight_grad bwd_input_grad".split()
__getattr__ = lazy_names(__name__, {f"_qkvlinear_autograd_{step}": "parallel_layers.neuron_only" for step in _STEPS})


def check_use_bias(
    weight_qkv: torch.Tensor | None,
    fuse_qkv: bool,
    weight_q: torch.Tensor | None,
    bias_q: torch.Tensor | None,
    bias_qkv: torch.Tensor | None,
) -> bool:
    """Returns whether there are biases, beside weights that are trained."""
    bias = bias_qkv if fuse_qkv else bias_q
    return bias is not None and check_requires_grad(weight_qkv, fuse_qkv, weight_q)


def check_requires_grad(weight_qkv: torch.Tensor | None, fuse_qkv: bool, weight_q: torch.Tensor | None) -> bool:
    """Returns whether the weights, fused or not, are trained."""
    weight = weight_qkv if fuse_qkv else weight_q
    assert weight is not None
    return weight.requires_grad

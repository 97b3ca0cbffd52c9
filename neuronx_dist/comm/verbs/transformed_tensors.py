"""Tensors of `torch.func` (grad, jvp, vmap) and of forward-mode AD, which a collective cannot take directly.

A verb communicates memory. For a dual number it would sum the value and silently keep the tangent; for a batched
tensor it cannot tell the hidden dims from the others. Operators of `spmd` have rules for them; verbs refuse them.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from ...torch_internals.transforms import (
    forward_mode_level,
    get_unwrapped,
    is_batchedtensor,
    is_forward_mode_enabled,
    jvp_levels,
    level_of,
    transforms_active,
)
from ..errors import CommError

__all__ = ["transforming", "untransformed", "whole_batch"]


def transforming() -> bool:
    """Returns whether a tensor may be a dual number, or wrapped by a transform of `torch.func`."""
    return forward_mode_level() >= 0 or transforms_active()


def untransformed(x: torch.Tensor, verb: str) -> torch.Tensor:
    """Returns the tensor that a verb may communicate: under `torch.func.grad` and `vjp` its value, a constant.

    Raises:
        CommError: the tensor has a tangent, or is batched.
    """
    with_tangents = jvp_levels()
    while (level := level_of(x)) is not None and level != -1:
        if level in with_tangents:
            raise _refusal(verb, "has a tangent (torch.func.jvp)")
        if is_batchedtensor(x):
            raise _refusal(verb, "is batched (torch.func.vmap)")
        x = get_unwrapped(x)
    dual = forward_mode_level() >= 0 and is_forward_mode_enabled()
    if dual and forward_ad.unpack_dual(x).tangent is not None:
        raise _refusal(verb, "has a tangent (torch.autograd.forward_ad)")
    return x


def whole_batch(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor without wrappers of `torch.func`: under `vmap` the whole batch."""
    while (level := level_of(x)) is not None and level != -1:
        x = get_unwrapped(x)
    return x


def _refusal(verb: str, what: str) -> CommError:
    return CommError(
        f"comm.{verb} of a tensor that {what}: verbs communicate values only, and no transforms. Use the "
        "matching operator of neuronx_dist.spmd (spmd.all_reduce, spmd.all_gather, ...), which supports them"
    )

"""Tensors of `torch.func` (grad, jvp, vmap) and of forward-mode AD, which a collective cannot take as they are.

A verb communicates memory. Of a dual number it would sum the value and leave the tangent as it is, in silence; of a
batched tensor it does not know which dims are its own. Operators of `spmd` have rules for them; verbs refuse them.
"""

from __future__ import annotations

import torch
from torch._C._functorch import TransformType, get_unwrapped, is_batchedtensor, maybe_get_level
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

from .errors import CommError

__all__ = ["transforming", "untransformed", "whole_batch"]

_transforms_active = torch._C._are_functorch_transforms_active


def transforming() -> bool:
    """Whether a tensor may be a dual number, or one that a transform of `torch.func` has wrapped."""
    return forward_ad._current_level >= 0 or _transforms_active()


def untransformed(x: torch.Tensor, verb: str) -> torch.Tensor:
    """The tensor that a verb may communicate: under `torch.func.grad` and `vjp` its value, a constant.

    Raises:
        CommError: it has a tangent, or is batched.
    """
    jvp_levels = {i.level() for i in retrieve_all_functorch_interpreters() if i.key() == TransformType.Jvp}
    while (level := maybe_get_level(x)) is not None and level != -1:
        if level in jvp_levels:
            raise _refusal(verb, "has a tangent (torch.func.jvp)")
        if is_batchedtensor(x):
            raise _refusal(verb, "is batched (torch.func.vmap)")
        x = get_unwrapped(x)
    dual = forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
    if dual and forward_ad.unpack_dual(x).tangent is not None:
        raise _refusal(verb, "has a tangent (torch.autograd.forward_ad)")
    return x


def whole_batch(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor: under `torch.func.vmap` of the whole batch."""
    while (level := maybe_get_level(x)) is not None and level != -1:
        x = get_unwrapped(x)
    return x


def _refusal(verb: str, what: str) -> CommError:
    return CommError(
        f"comm.{verb} of a tensor that {what}: verbs communicate values only, and nothing of a transform. Use the "
        f"operator of neuronx_dist.spmd that does the same (spmd.all_reduce, spmd.all_gather, ...), which follows it"
    )

"""`torch.func`, `torch.vmap` and forward-mode AD: which is active, and what wraps a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import TransformType, maybe_get_level
from torch._C._functorch import get_unwrapped as get_unwrapped
from torch._C._functorch import is_batchedtensor as is_batchedtensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._functorch import eager_transforms as eager_transforms
from torch._functorch import vmap
from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters
from torch.autograd import forward_ad

# `level_of`, `get_unwrapped` and `is_batchedtensor` look through the wrappers of `torch.func`. Without them a verb
# would communicate the value of a dual number and leave the tangent as it is, in silence.

level_of = maybe_get_level
vmap_module: Any = vmap
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active

# Names in `vmap_module` and in `eager_transforms` of the functions that wrap and unwrap tensors, which the checker
# replaces. Without them types do not pass through `torch.vmap` and `torch.func.grad`.
ADD_BATCH_DIM, REMOVE_BATCH_DIM = "_add_batch_dim", "_remove_batch_dim"
WRAP_FOR_GRAD, UNWRAP_FOR_GRAD = "_wrap_for_grad", "_unwrap_for_grad"


def forward_mode_level() -> int:
    """Depth of `torch.autograd.forward_ad.dual_level`; -1 outside of it."""
    return forward_ad._current_level


def is_forward_mode_enabled() -> bool:
    """Returns whether dual numbers propagate tangents here."""
    return torch._C._is_fwd_grad_enabled()


def jvp_levels() -> set[Any]:
    """Levels of the transforms that carry tangents."""
    return {i.level() for i in retrieve_all_functorch_interpreters() if i.key() == TransformType.Jvp}

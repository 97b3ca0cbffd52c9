"""Attributes and functions of tensors and storages that torch does not make public; containers of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree

# Walks over nested containers. Without it nothing is recorded, divided or cut into microbatches.
pytree = _pytree

# Context managers inside which no mode and no subclass sees calls of torch. Without them the checker checks itself, and
# ShardTensor's handlers call themselves.
DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass  # subclasses only

# Constructors of tensor subclasses: without memory; with the memory of a tensor. Without them there is no ShardTensor,
# and making fake tensors takes twice the time.
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass

# Makes C++ code that asks a tensor without memory for its address raise an error; else it gets 0, and reads from there.
refuse_address: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr

# Functions over lists of tensors, which take one kernel on CUDA. Without them: a loop.
foreach_mul, foreach_mul_, foreach_norm = torch._foreach_mul, torch._foreach_mul_, torch._foreach_norm

# All of them, with the name of the function of one tensor: `torch._foreach_add_`, and torch 2.15's public
# `torch.foreach.add_`. Without them lists of typed or sharded tensors are refused.
foreach_functions: dict[Any, str] = {
    getattr(torch, name): name.removeprefix("_foreach_") for name in dir(torch) if name.startswith("_foreach_")
}
_foreach: Any = getattr(torch, "foreach", None)
foreach_functions |= {getattr(_foreach, name): name for name in getattr(_foreach, "__all__", ())}

# One step of an optimizer over lists of tensors, and the unscaling of their gradients, as `torch.optim` and
# `torch.amp.GradScaler` call them. Without them fused optimizers and gradient scaling refuse ShardTensors.
fused_updates: list[Any] = [torch._fused_sgd_, torch._fused_adam_, torch._fused_adamw_, torch._fused_adagrad_]
amp_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_

# Functions that modes receive where users call public ones. Without a rule for each the checker refuses the call.
native_nn: Any = torch._C._nn  # `torch.nn.functional` calls gelu, pad, glu, ... of it
conj_copy, neg_view_copy = torch._conj_copy, torch._neg_view_copy
tensor_to: Any = torch.Tensor.to  # equal to what `neuronx_dist.compat` puts in its place
tensor_factories: tuple[Any, ...] = (torch.tensor, torch.as_tensor, torch.asarray)  # likewise
set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled

assert_async: Callable[..., None] = torch._assert_async  # fails without a wait for the device; else: a synchronisation
functional_assert_async: Callable[..., Any] = torch._functional_assert_async
has_compatible_type = torch._has_compatible_shallow_copy_type  # may `param.data = value`? Else modules cannot be moved
rebuild_tensor = torch._utils._rebuild_tensor_v3  # what `torch.save` names in a file; without it DCP's format is lost


def version_of(x: Any) -> int:
    """Number of writes into a tensor's memory, by which stale types, gradients and copies are noticed."""
    return x._version


def is_view(x: torch.Tensor) -> bool:
    """Returns whether autograd knows the tensor as a view: a write into it has to be seen by its base."""
    return x._is_view()


def without_base(x: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a view as a tensor that autograd does not take for a view, so that it may be written."""
    result: torch.Tensor = torch.ops.aten._unsafe_view(x, x.shape)
    return result


def base_of_view(x: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor that `x` is a view of, if autograd knows of one; without it views are copied."""
    return x._base


def backward_hooks(x: Any) -> dict[int, Any] | None:
    """Returns the table of `register_hook`, if there is one; without it hooks of earlier registration go unchecked."""
    return x._backward_hooks


def post_accumulate_hooks(x: Any) -> dict[int, Any] | None:
    """Returns the table of `register_post_accumulate_grad_hook`, if there is one; without it ours stay for ever."""
    return x._post_accumulate_grad_hooks


def storage_key(storage: Any) -> int:
    """Address of a storage's C++ object, the same for all Python objects of it; fake tensors have no data pointer."""
    return storage._cdata


def has_storage(x: torch.Tensor) -> bool:
    """Returns whether a tensor has memory at all: sparse ones and wrappers raise where they are asked for it."""
    return torch._C._has_storage(x)


def is_alias_of(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Returns whether two tensors share a storage; without it masters that are rows of a parameter are copied."""
    return torch._C._is_alias_of(a, b)  # type: ignore[attr-defined]


def dispatch_keys(x: torch.Tensor) -> Any:
    """Keys by which the dispatcher chooses kernels: tensors that differ in them do not share a recorded call."""
    return torch._C._dispatch_key_set(x)


def state_dict_metadata(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Entries by prefix that travel with a state dict: versions, and our layouts. Empty if there are none."""
    return getattr(state_dict, "_metadata", {})

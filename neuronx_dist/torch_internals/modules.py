"""Members of `nn.Module` that torch does not make public, and methods of torch's classes that ours extend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.utils import clip_grad

# Names that stay as they are in all files, by the class that has them: slots, which torch's own guides assign to, and
# methods that subclasses override. Without them modules cannot be replaced, moved, saved or loaded.
EXTENDED: dict[str, tuple[str, ...]] = {
    "torch.nn.Module": (
        *("_parameters", "_buffers", "_modules"),
        *("_apply", "_save_to_state_dict", "_load_from_state_dict"),
    ),
    # Overridden by `neuronx-dist run`, which reports that ranks are started again.
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent": ("_monitor_workers",),
}

# `BackwardHookFunction`, imported above, passes a module's tensors through, to find their gradients: without it the
# checker judges it as a function of the user.

IncompatibleKeys = _IncompatibleKeys  # the result of `load_state_dict`, with the same repr


def call_with_hooks(module: nn.Module) -> Callable[..., Any]:
    """Returns what `module(...)` calls when nothing has been put in the place of `__call__`, as the recorder does."""
    return module._call_impl


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the buffers that state dicts leave out; without it checkpoints hold too much."""
    return module._non_persistent_buffers_set


_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Moves the forward and backward hooks of a module to the one in its place; handles of the hooks remove them there.

    Without it a replaced layer loses them: Hugging Face's reentrant checkpointing has one on the embedding.
    """
    for name in _HOOKS:
        hooks = getattr(old, name)
        setattr(new, name, hooks)
        setattr(old, name, type(hooks)())


def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """Returns the learning-rate schedulers inside of one; without them they set an optimizer that was replaced."""
    return getattr(scheduler, "_schedulers", ())


def before_clipping(check: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Makes `torch.nn.utils.clip_grad_norm_` call `check(parameters)` before it scales gradients.

    Without it a script that clips by torch scales the gradients of each rank by another factor. Scripts import the
    function before this package is set up, so that its last step is replaced, which it looks up when it is called;
    `torch.nn.utils.clip_grads_with_norm_`, which takes a norm, is another name of that step, and stays as it is.
    """
    clip_grad._clip_grads_with_norm_ = _checked(clip_grad._clip_grads_with_norm_, check)
    if nn.utils.clip_grad_norm_ is not clip_grad.clip_grad_norm_:  # torch_xla replaced it
        nn.utils.clip_grad_norm_ = _checked(nn.utils.clip_grad_norm_, check)


def after_unscaling(share: Callable[[torch.optim.Optimizer, torch.Tensor], None]) -> None:
    """Makes `torch.amp.GradScaler` call `share(optimizer, found_inf)` with what it has found, a 0-dim 1 or 0.

    Without it the ranks that hold an infinite gradient leave a step out, and the other ranks make it.
    """
    unscale = torch.amp.GradScaler._unscale_grads_

    @functools.wraps(unscale)
    def shared(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = unscale(scaler, optimizer, *args, **kwargs)
        for found_inf in found.values():
            share(optimizer, found_inf)
        return found

    torch.amp.GradScaler._unscale_grads_ = shared  # type: ignore[method-assign,assignment]


def _checked(clip: Callable[..., Any], check: Callable[[Sequence[torch.Tensor]], None]) -> Callable[..., Any]:
    """Returns `clip`, called after `check` with the same list of parameters."""

    @functools.wraps(clip)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check(parameters)
        return clip(parameters, *args, **kwargs)

    return checked


def has_forward_hooks(module: nn.Module) -> bool:
    """Returns whether hooks run before or after a module's forward."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Returns whether a module's output passes through the autograd function of its full backward hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)

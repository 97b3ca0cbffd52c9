"""The running backward, nodes of the graph, hooks on saved tensors, checkpoints, custom functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import _HookMixin, _SingleLevelFunction

# The node that accumulates a leaf's gradient. Without it a backward in halves cannot tell parameters from activations.
AccumulateGrad: Any = getattr(torch._C._functions, "AccumulateGrad")  # noqa: B009  # its stubs lack it

# Base of the nodes that `torch.autograd.Function`s in Python make. Without it custom functions are not halved.
FunctionNode: Any = torch._C._FunctionBase

# The base in Python of `torch.autograd.Function`: torch's `apply` in Python ends in that of this class, which is in C.
# Without it functions are not checked that a program bound (`apply = MyFunction.apply`) before the check.
FunctionBase: Any = _SingleLevelFunction

# `setattr(HookMixin, REGISTER_HOOK, ...)` sees hooks of nodes. Without it the checker does not know what they change.
HookMixin = _HookMixin
REGISTER_HOOK = "_register_hook"

# Name in `torch.utils.checkpoint` of the hook around what a checkpoint saves. Without it a checkpoint is recomputed in
# each half of a backward, and `parallelize` cannot compare a program that has one with the original.
CHECKPOINT_HOOK = "_checkpoint_hook"
RECOMPUTATION_HOOK = "_recomputation_hook"  # without it functions are checkpointed in forward alone

# The stack of hooks on saved tensors in this thread. Without it a recording does not know a call's checkpoints.
top_saved_tensors_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
pop_saved_tensors_hooks: Callable[[], Any] = torch._C._autograd._pop_saved_tensors_default_hooks
push_saved_tensors_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks


def in_backward() -> bool:
    """Returns whether this thread runs a backward: there the checker judges gradients, and records no forward."""
    return torch._C._current_graph_task_id() != -1


def current_node() -> Any:
    """Returns the node that the engine runs now; without it a hook of a node cannot be judged."""
    return torch._C._current_autograd_node()


def function_class(node: Any) -> Any:
    """Returns the `torch.autograd.Function` of a node, None of a node of torch's own."""
    return getattr(type(node), "_forward_cls", None)


def backward_class(function: Any) -> Any:
    """Returns the class of the nodes that a `torch.autograd.Function` makes; its `saved_tensors` are replaced."""
    return function._backward_cls


def saved_tensors_of(ctx: Any) -> tuple[Any, ...]:
    """Returns `ctx.saved_tensors` where `backward_class` has another property of that name."""
    return FunctionNode.saved_tensors.__get__(ctx)


def set_needs_input_grad(node: Any, needs: tuple[bool, ...]) -> None:
    """Tells a custom node which gradients to compute; without it each half of a backward computes all of them."""
    node.needs_input_grad = needs


def input_metadata(node: Any) -> Any:
    """Returns shape, dtype and device of each gradient that a node receives: zeros are made of them."""
    return node._input_metadata


def raw_saved_names(node_class: type) -> tuple[str, ...]:
    """Names of a node's saved tensors, which `register_hooks` and `getattr` take; without them none is freed early."""
    return tuple(name for name in dir(node_class) if name.startswith("_raw_saved_"))


def saved_value(node: Any, name: str) -> Any:
    """Returns what a node of torch's own saved of its operand `name`, None if nothing.

    Raises:
        RuntimeError: it has been freed.
    """
    return getattr(node, f"_saved_{name}", None)


def is_checkpoint_hook(pack: Callable[..., Any]) -> bool:
    """Returns whether a hook that packs saved tensors is that of a checkpoint without reentrance."""
    return getattr(pack, "__qualname__", "").startswith(f"{CHECKPOINT_HOOK}.")


def in_checkpoint() -> bool:
    """Returns whether what runs now is inside of a checkpoint without reentrance, in forward or in recomputation."""
    top = top_saved_tensors_hooks(False)
    return top is not None and getattr(top[0], "__qualname__", "").startswith((CHECKPOINT_HOOK, RECOMPUTATION_HOOK))


def checkpoint_context(pack: Callable[..., Any]) -> Any:
    """Returns the context in which a checkpoint recomputes, of its hook `pack`: `context_fn` made it."""
    frame = _closed_over(pack, "frame")
    return _closed_over(frame.recompute_fn, "recompute_context")


def _closed_over(function: Callable[..., Any], name: str) -> Any:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    return cells[name].cell_contents


def apply_without_transforms(function: Any) -> Callable[..., Any]:
    """Returns `function.apply` without its look at `torch.func`: the C++ method that the Python one ends in.

    The Python one asks whether a transform is active, and unwraps dead functorch wrappers, in each call. Transforms do
    not go through tensor subclasses that wrap a tensor, so that this is time lost in a path that every call takes. Nor
    does `spmd.intercept`, which replaces the Python one, receive these calls: they are no functions of the user.
    """
    return super(torch.autograd.Function, function).apply

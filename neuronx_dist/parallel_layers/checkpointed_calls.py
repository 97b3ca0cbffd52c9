"""Function calls under activation checkpoints, of a module's attention or of functions of torch; inputs on the host.

How "attention" finds the function: modules of transformers call one of their attention interface, which runs under a
checkpoint in modules that have the mark `_ATTENTION` (`_attend`); others call torch's, which the mode `_Calls` sees.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from ..spmd.random import checkpoint
from ..torch_internals.autograd import in_checkpoint
from ..torch_internals.tensors import storage_key, version_of

__all__ = ["attends", "checkpoint_on_host", "recompute_attention", "run_inside", "unchanged", "writes_argument"]

_IN_PLACE = re.compile(r".*[^_]_|__(i(add|sub|mul|truediv|floordiv|mod|and|or|xor|lshift|rshift|pow)|set(item)?)__")
_ATTENTION = "_recomputed_attention"  # attribute of a module of transformers: the checkpoint that its attention runs in
_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name by which modules of transformers read the attention interface
_FUNCTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_local = threading.local()  # .modes: the functions that `_Calls` of this thread run under checkpoints


def attends(module: nn.Module) -> bool:
    """Returns whether the forward of a module calls an attention function."""
    return _calls(module, _INTERFACE, *(function.__name__ for function in _FUNCTIONS))


def _calls(module: nn.Module, *names: str) -> bool:
    """Returns whether the forward of a module's class, or a function inside of it, reads one of these names."""
    code = [inspect.unwrap(type(module).forward).__code__]
    code += [constant for constant in code[0].co_consts if inspect.iscode(constant)]
    return any(not set(names).isdisjoint(one.co_names) for one in code)


def recompute_attention(module: nn.Module, run: Callable[..., Any]) -> None:
    if not _calls(module, _INTERFACE):
        run_inside(module, _FUNCTIONS.__contains__, run)
        return
    vars(module).setdefault(_ATTENTION, _Mark(run))
    vars(module).setdefault("forward", module.forward)  # a pipeline's recording before it does not serve any more


class _Mark:
    """Checkpoint in which a module's attention runs; in each process that has one the interface asks for it."""

    def __init__(self, run: Callable[..., Any]) -> None:
        from transformers.modeling_utils import AttentionInterface  # type: ignore[import-untyped, unused-ignore]

        self.run, get_interface = run, AttentionInterface.get_interface
        if not hasattr(get_interface, _ATTENTION):

            def get(self: Any, *args: Any, **kwargs: Any) -> Any:
                return partial(_attend, get_interface(self, *args, **kwargs))

            AttentionInterface.get_interface = update_wrapper(get, get_interface)
            setattr(get, _ATTENTION, True)

    def __reduce__(self) -> Any:
        return _Mark, (self.run,)  # after pickling: in another process


def _attend(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Runs a function of transformers' attention interface, under a checkpoint if the module has the mark."""
    mark = vars(module).get(_ATTENTION)
    if mark is None:
        return function(module, *args, **kwargs)
    return mark.run(unchanged(function, f"the attention of {type(module).__name__}", mark.run), module, *args, **kwargs)


def run_inside(module: nn.Module, called: Callable[[Any], bool], run: Callable[..., Any]) -> None:
    """Makes the functions that a module calls, and for which `called` is true, run under checkpoints."""
    module.forward = update_wrapper(partial(_with_calls, module.forward, called, run), module.forward)


def _with_calls(
    forward: Callable[..., Any], called: Callable[[Any], bool], run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    with _Calls(called, run):
        return forward(*args, **kwargs)


def writes_argument(function: Any) -> bool:
    """Returns whether a function changes its first argument, by its name."""
    return _IN_PLACE.fullmatch(getattr(function, "__name__", "")) is not None


class _Calls(TorchFunctionMode):
    """Runs the functions for which `called` is true under checkpoints: of nested modes the innermost does."""

    def __init__(self, called: Callable[[Any], bool], run: Callable[..., Any]) -> None:
        super().__init__()
        self._called, self._run = called, run

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(_local, "is_inside", False) or not torch.is_grad_enabled() or not self._called(func):
            return func(*args, **(kwargs or {}))
        is_recomputed = not is_compiling() and in_checkpoint()  # without this mode
        if is_recomputed or writes_argument(func) or (kwargs and (kwargs.get("inplace") or "out" in kwargs)):
            return func(*args, **(kwargs or {}))
        _local.is_inside = True
        try:
            once = unchanged(func, func.__name__, self._run)
            call, values, _ = _distinct(once, args, kwargs or {})  # attention of x to itself needs one x
            return self._run(call, *values)
        finally:
            _local.is_inside = False


def unchanged(function: Callable[..., Any], name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function for a checkpoint: it raises if a tensor among its arguments changes in place until backward.

    Those on the host (`checkpoint_on_host`) are copies, which only the call itself can change.
    """
    if is_compiling() or not torch.is_grad_enabled():
        return function
    before: dict[Any, tuple[int, bool]] = {}  # version, and whether it is the same tensor in backward

    def check(arguments: dict[Any, Any], when: str) -> None:
        for key, (version, stays) in before.items():
            if version_of(arguments[key]) != version and (stays or when == "by the call"):
                raise RuntimeError(
                    f"recompute: argument {key!r} of {name} was changed in place {when}, so that backward would "
                    f"recompute another result: pass a copy to {name}, or do not recompute it"
                )

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        if before:
            check(arguments, "after the call")
            return function(*args, **kwargs)
        for key, x in arguments.items():
            if isinstance(x, torch.Tensor) and not x.is_inference():
                before[key] = version_of(x), run is not checkpoint_on_host or not _moves(x)
        result = function(*args, **kwargs)
        check(arguments, "by the call")
        return result

    return call


# --- inputs on the host -----------------------------------------------------------------------------------------------


def checkpoint_on_host(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a function as `checkpoint` does, and moves the activations among its arguments to the host until backward.

    These are tensors that require a gradient and have a history: weights, masks and rotary embeddings, which others
    hold too, stay. In compiled code all stay.
    """
    if is_compiling() or not torch.is_grad_enabled():
        return checkpoint(function, *args, **kwargs)
    function, args, _ = _distinct(function, args, kwargs)
    tensors = [x for x in args if isinstance(x, torch.Tensor) and _moves(x)]
    moved = {storage_key(x.untyped_storage()) for x in tensors}
    with torch.autograd.graph.saved_tensors_hooks(partial(_to_host, moved), _from_host):
        return checkpoint(function, *args)


def _distinct(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns a function of the distinct values among the arguments, these, and no keywords.

    A checkpoint saves positional arguments alone, each by itself.
    """
    values = (*args, *kwargs.values())
    distinct = {id(x): x for x in values}
    positions = {key: position for position, key in enumerate(distinct)}
    order = [positions[id(x)] for x in values]

    def call(*distinct: Any) -> Any:
        again = [distinct[position] for position in order]
        return function(*again[: len(args)], **dict(zip(kwargs, again[len(args) :])))

    return call, tuple(distinct.values()), {}


def _moves(x: torch.Tensor) -> bool:
    return x.requires_grad and not x.is_leaf


def _to_host(moved: set[int], x: torch.Tensor) -> Any:
    if storage_key(x.untyped_storage()) not in moved:
        return x
    on_host = torch.empty_like(x, device="cpu", pin_memory=x.device.type == "cuda")
    return x.device, on_host.copy_(x, non_blocking=True)


def _from_host(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    device, on_host = saved
    return on_host.to(device, non_blocking=True)

"""Modes in which an emitted program and its original are compared: without random numbers, and in float64."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from ..shared_context import Replacement
from ..spmd.intercept import intercept
from ..spmd.random import checkpoint

__all__ = ["Deterministic", "InDouble", "checkpoint_in", "in_double", "wide_dtype", "without_checkpoints"]


class Deterministic(TorchFunctionMode):
    """No random numbers: dropout lets everything pass, and what is drawn is 0.5."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if func in _DROPOUT:
            return args[0] if args else (kwargs or {})["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *([0.0] if len(args) > 4 else ()), *args[5:]), dict(kwargs or {})
            kwargs.pop("dropout_p", None)
        result = func(*args, **(kwargs or {}))
        if name.rstrip("_") in _DRAWN and isinstance(result, torch.Tensor):
            return torch.full_like(result, 0.5) if result.is_floating_point() else torch.zeros_like(result)
        return result


class InDouble(TorchFunctionMode):
    """Floating point numbers are float64, whatever dtype a call asks for. (Autocast leaves those alone.)"""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        args, kwargs = pytree.tree_map_only(torch.dtype, wide_dtype, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, in_double, result)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The widest dtype of its class."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def in_double(x: torch.Tensor) -> torch.Tensor:
    """A tensor as `InDouble` has it."""
    return x.to(wide_dtype(x.dtype)) if wide_dtype(x.dtype) != x.dtype else x


def checkpoint_in(mode: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any], *args: Any) -> Any:
    """`checkpoint` in these modes: in backward torch turns them off."""

    def in_modes(*args: Any) -> Any:
        with mode(), Deterministic():
            return function(*args)

    return checkpoint(in_modes, *args)


_local = threading.local()  # .keeps: checkpoints of this thread keep what is saved


def _keep(x: torch.Tensor) -> torch.Tensor:
    return x


def _hook(*args: Any) -> Any:
    """What torch puts around what a checkpoint saves."""
    if getattr(_local, "keeps", False):
        return torch.autograd.graph.saved_tensors_hooks(_keep, _keep)
    return _replacement.before["_checkpoint_hook"](*args)


_replacement = Replacement(torch.utils.checkpoint, _checkpoint_hook=_hook)


def _run(original: Callable[..., Any], cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if cls is torch.utils.checkpoint.CheckpointFunction:
        function, _, *inputs = args
        return function(*inputs)
    return original(*args, **kwargs)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside, in this thread, activation checkpoints keep all: backward would recompute outside of these modes."""
    with _replacement, intercept(_run):
        _local.keeps = True
        try:
            yield
        finally:
            _local.keeps = False


_DROPOUT = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
}  # fmt: skip
_DRAWN = {"rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "bernoulli", "normal", "uniform"}

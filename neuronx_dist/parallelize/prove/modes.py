"""Modes in which an emitted program and its original are compared: with equal random numbers, and in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ...spmd.checkpoint_hooks import treated_checkpoints
from ...spmd.random import checkpoint
from ...torch_internals.operators import TorchDispatchMode
from ...torch_internals.tensors import pytree

__all__ = ["InDouble", "checkpoint_in", "deterministic", "in_double", "wide_dtype", "without_checkpoints"]


@contextmanager
def deterministic() -> Iterator[None]:
    """Dropout passes everything; any other operator draws the numbers of seed 0, in each call."""
    with _WithoutDropout(), _SeededCalls():
        yield


class _WithoutDropout(TorchFunctionMode):
    """Replaces dropout, whose masks for shards are no part of the mask for the whole, by its input.

    Attention with an added mask is not computed by torch's fused kernel for CPUs: if finite numbers hide a row from all
    keys, its gradients are as many times too large as there are keys.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _DROPOUT:
            return args[0] if args else (kwargs or {})["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *([0.0] if len(args) > 4 else ()), *args[5:]), dict(kwargs or {})
            kwargs.pop("dropout_p", None)
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            if mask is not None and mask.dtype != torch.bool:
                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **kwargs)
        return func(*args, **(kwargs or {}))


class _SeededCalls(TorchDispatchMode):
    """Seeds torch's generator before each operator that draws."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return func(*args, **(kwargs or {}))


class InDouble(TorchFunctionMode):
    """Makes all floating point numbers float64, whatever dtype a call asks for. (Autocast leaves float64 alone.)"""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16):
            func = torch.Tensor.double
        args, kwargs = pytree.tree_map_only(torch.dtype, wide_dtype, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, in_double, result)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the widest dtype of the same class: complex128, float64, or an integer dtype as it is."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def in_double(x: torch.Tensor) -> torch.Tensor:
    """Returns a tensor in the dtype that `InDouble` gives it."""
    return x.to(wide_dtype(x.dtype)) if wide_dtype(x.dtype) != x.dtype else x


def checkpoint_in(mode: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any], *args: Any) -> Any:
    """Checkpoints a function that enters these modes itself, because torch leaves them in backward."""

    def in_modes(*args: Any) -> Any:
        with mode(), deterministic():
            return function(*args)

    return checkpoint(in_modes, *args)


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Makes activation checkpoints of this thread keep everything: backward would recompute outside of these modes."""

    def keeping(_: Any) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)

    with treated_checkpoints(keeping, lambda function, preserve_rng_state, *inputs: function(*inputs)):
        yield


def _unchanged(x: torch.Tensor) -> torch.Tensor:
    return x


_DROPOUT = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout,
}  # fmt: skip

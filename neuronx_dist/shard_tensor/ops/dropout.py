"""Dropout, and tensors that are filled with random numbers in place.

`draws.py` says which numbers a rank draws.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn import init

from ..draws import drawn
from ..handlers import sharded
from ..tensor import ShardTensor, gradient_spec, wrap, written
from .pointwise import check_writable

__all__: list[str] = []

_T = torch.Tensor
_ALPHA = 1.7580993408473766  # of SELU: scale * alpha
_FEATURES: tuple[Any, ...] = (
    *(F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout),
    *(torch.feature_dropout, torch.feature_alpha_dropout),
)
_ALPHAS: tuple[Any, ...] = (
    *(F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.alpha_dropout, torch.feature_alpha_dropout),
)


def _kept(x: ShardTensor, p: float, dims: int) -> ShardTensor:
    """Draws a mask: 1 for elements that stay and 0 elsewhere, one draw for each element of the first dims."""
    spec = gradient_spec(x._spec)
    blank = partial(torch.empty, dtype=x.dtype, device=x.device)
    return wrap(drawn(lambda shape: blank(shape).bernoulli_(1 - p), spec, dims=dims), spec)


@sharded(F.dropout, torch.dropout, *_FEATURES, *_ALPHAS)
def _dropout(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(
        input: ShardTensor, p: float = 0.5, training: bool = func not in _ALPHAS, inplace: bool = False, **train: bool
    ) -> Any:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not train.get("train", training) or p == 0:
            return input
        dims = input.dim()
        if func in _FEATURES:
            of_one_sample = (func, dims) in ((F.dropout1d, 2), (F.dropout3d, 4))
            dims = 1 if of_one_sample else 2  # its channels, or those of a batch
        mask = _kept(input, p, dims)
        if func in _ALPHAS:
            a = 0.0 if p == 1 else ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
            y = input * (mask * a) + ((mask - 1) * (_ALPHA * a) + _ALPHA * a * p)
        else:
            y = input * (mask / (1 - p) if p < 1 else mask)
        return input.copy_(y) if inplace else y

    return call(*args, **kwargs)


_INITS: tuple[Any, ...] = (init.uniform_, init.normal_, init.constant_, init.kaiming_uniform_)
_DRAWS = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_".split()


@sharded(*_INITS, *(getattr(_T, name) for name in _DRAWS))
def _drawn(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    x, *others = args or (kwargs.pop("tensor"),)
    if any(isinstance(other, torch.Tensor) for other in others):
        raise NotImplementedError(
            f"{func.__name__} with a tensor of probabilities is not supported: call full_tensor() first"
        )
    check_writable(func.__name__, x)
    blank = partial(torch.empty, dtype=x.dtype, device=x.device)
    generator = kwargs.get("generator")
    local = drawn(lambda shape: func(blank(shape), *others, **kwargs), x._spec, generator=generator)
    with torch.set_grad_enabled(torch.is_grad_enabled() and func not in _INITS):
        x._local.copy_(local)
        return written(x)

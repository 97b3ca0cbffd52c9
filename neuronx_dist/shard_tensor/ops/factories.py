"""Tensors that are made like another one: random ones, and `x.new_zeros(size)` and its relatives.

Random ones have the values of one process at any layout (see draws.py). A new tensor with the shape of `x` has its
layout, with Replicate in place of Partial; one of another shape is Replicate everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..draws import drawn
from ..handlers import sharded
from ..spec import make_spec
from ..tensor import ShardTensor, as_leaf, gradient_spec

__all__: list[str] = []

_T = torch.Tensor


@sharded(torch.rand_like, torch.randn_like, torch.randint_like)
def _drawn_like(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> ShardTensor:
    x, *others = args or (kwargs.pop("input"),)
    requires_grad = kwargs.pop("requires_grad", False)
    spec = gradient_spec(x._spec)
    blank = partial(torch.empty, dtype=x.dtype, device=x.device)
    local = drawn(lambda shape: func(blank(shape), *others, **kwargs), spec, generator=kwargs.get("generator"))
    return as_leaf(local, spec, requires_grad)


@sharded(_T.new_empty_strided)
def _new_empty_strided(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> ShardTensor:
    """Makes an empty tensor of a size; the strides of the part on a rank are its own."""

    def call(x: Any, size: Any, stride: Any, **options: Any) -> ShardTensor:
        return _new(_T.new_empty, types, (x, size), options)

    return call(*args, **kwargs)


@sharded(_T.new_zeros, _T.new_ones, _T.new_empty, _T.new_full)
def _new(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> ShardTensor:
    x, *others = args
    requires_grad = kwargs.pop("requires_grad", False)
    fill = [others.pop()] if func.__name__.startswith("new_full") and len(others) == 2 else []
    size = kwargs.pop("size", others)
    shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
    spec = gradient_spec(x._spec)
    spec = spec if shape == spec.shape else make_spec(spec.mesh, None, shape)
    return as_leaf(func(x._local.detach(), spec.local_shape, *fill, **kwargs), spec, requires_grad)


@sharded(_T.new_tensor)
def _new_tensor(func: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
    def call(x: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
        if isinstance(data, ShardTensor):
            copy = data.detach().to(device or x.device, dtype or x.dtype, copy=True)
            return copy.requires_grad_(requires_grad)
        assert isinstance(x, ShardTensor)
        local = x._local.detach().new_tensor(data, dtype=dtype, device=device)
        return as_leaf(local, make_spec(x._spec.mesh, None, local.shape), requires_grad)

    return call(*args, **kwargs)

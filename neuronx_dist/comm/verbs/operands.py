"""Operands and results of the verbs: shapes, dtypes, `out=`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...call_site import calling_module
from ..base import Communicator

__all__ = ["check_out", "checked_dim", "deliver", "gathered_shape", "indivisible", "scattered_first", "wire_dtype"]

_OPS = ("sum", "max", "min")


def check_out(out: torch.Tensor | None, shape: Sequence[int], comm: Communicator, verb: str) -> None:
    if out is not None and tuple(out.shape) != tuple(shape):  # `copy_` would broadcast
        raise ValueError(
            f"{verb} over {comm.axis}: out has shape {tuple(out.shape)}, but the result has {tuple(shape)}"
        )


def deliver(value: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Puts `value` into `out` if there is one, else casts it to `dtype`; returns the result."""
    if out is None:
        return value if value.dtype == dtype else value.to(dtype)
    if out is not value:
        with torch.no_grad():
            out.copy_(value)
    return out


def wire_dtype(x: torch.Tensor, op: str, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a sum: `reduce_dtype` if it is wider (bf16 -> fp32); max and min use the dtype of `x`."""
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}; got {op!r}")
    if reduce_dtype is None or reduce_dtype == x.dtype or op != "sum":
        return x.dtype
    return torch.promote_types(x.dtype, reduce_dtype)


def checked_dim(x: torch.Tensor, dim: int, verb: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{verb}: dim {dim} is out of range for a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


def gathered_shape(x: torch.Tensor, dim: int, comm: Communicator) -> tuple[int, ...]:
    """Returns the shape of a tensor gathered along `dim`: `[.., n, ..] -> [.., size*n, ..]`."""
    return (*x.shape[:dim], comm.size * x.shape[dim], *x.shape[dim + 1 :])


def indivisible(x: torch.Tensor, dim: int, comm: Communicator, verb: str) -> ValueError:
    """Returns the error for a dim that does not divide by the group's size; it names the running layer."""
    module = calling_module()
    return ValueError(
        f"{verb} over {comm.axis}: unable to create {comm.size} partitions along dim {dim} of shape "
        f"{tuple(x.shape)}: {x.shape[dim]} is not divisible by {comm.size}" + (f"; in {module}" if module else "")
    )


def scattered_first(x: torch.Tensor, dim: int, comm: Communicator, verb: str) -> torch.Tensor:
    """Returns `x` with the pieces for the ranks as first dim: `[.., size*n, ..] -> [size, .., n, ..]`."""
    dim = checked_dim(x, dim, verb)
    if x.shape[dim] % comm.size:
        raise indivisible(x, dim, comm, verb)
    split = x.view(*x.shape[:dim], comm.size, x.shape[dim] // comm.size, *x.shape[dim + 1 :])
    return split if dim == 0 else split.movedim(dim, 0)

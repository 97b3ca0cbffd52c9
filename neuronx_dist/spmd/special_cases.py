"""Rare uses of the operators: means, options, and messages for pairs of types that an operator does not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import comm
from ..comm.context import AxisLike
from .errors import SpmdTypeError
from .operator_options import exchange_dims, options_of
from .rows import ROWS
from .types import P, R, Shard, SpmdType

__all__ = ["advice", "averaged", "dim_error", "exchange_dims", "options_of"]


def averaged(
    operate: Callable[..., torch.Tensor],
    function: Callable[..., torch.Tensor],
    x: torch.Tensor,
    axis: AxisLike,
    src: SpmdType,
    dst: SpmdType,
    **options: Any,
) -> torch.Tensor:
    """Runs an operator from P("avg"), which divides the sum by the size of the axis, or from R, its own mean, to it."""
    name = function.__name__
    if name == "reinterpret" and (src, dst) == (R, P("avg")):
        return operate(function, x, axis, R, P)
    if src != P("avg") or dst.scale or name not in ("all_reduce", "reduce_scatter"):
        raise SpmdTypeError(
            f'{name}({src}, {dst}) does not exist: all_reduce and reduce_scatter take P("avg"), and '
            'reinterpret(R, P("avg")) gives it; else divide or multiply by comm.size(axis)'
        )
    if not (x.is_floating_point() or x.is_complex()):
        raise SpmdTypeError(f"{name}({src}, {dst}) of {x.dtype}: a mean is no integer, sum and divide")
    count = comm.size(axis)
    if count > 1:  # before the sum, which could overflow
        x = x.div_(count) if options.get("inplace") else x / count
    return operate(function, x, axis, P, dst, **options)


def dim_error(name: str, x: torch.Tensor, src: SpmdType, dst: SpmdType, dim: int, passed: int) -> SpmdTypeError:
    """Returns the error of `gather_dim` or `scatter_dim` that is not the dim of the shard."""
    gathers = name == "all_gather"
    shard, option = (src, "gather_dim") if gathers else (dst, "scatter_dim")
    return SpmdTypeError(
        f"{name} of a tensor {list(x.shape)}, src={src}, dst={dst}, {option}={passed}",
        f"{shard} {'concatenates' if gathers else 'splits'} dim {dim}, and {option} names dim {passed}",
        repairs=[f"leave {option} out", f"S({passed}) in place of {shard}"],
        rule="dim",
    )


def advice(operation: str, src: SpmdType, dst: SpmdType) -> str:
    """Returns the message for `operation(src, dst)`, which does not exist: the fault, and the probable intention."""
    legal = ", ".join(f"({s}, {d})" for (name, s, d) in ROWS if name == operation)
    why = _why(operation, src, dst)
    text = f"{operation}({src}, {dst}) does not exist: {why}{_instead(src, dst)}"
    return f"{text}. {operation} takes {legal}"


def _why(operation: str, src: SpmdType, dst: SpmdType) -> str:
    a, b = src.letter, dst.letter
    reduces = operation in ("all_reduce", "reduce_scatter")
    if a in "RI" and reduces:
        return f"a {a} value is the same on all ranks already, and a sum multiplies it by their number: drop it; "
    if a in "RI" and operation in ("all_gather", "all_to_all"):
        return f"a {a} value is whole on every rank already; "
    if a == "S" and reduces:
        return "the ranks hold pieces, and a sum adds them up; "
    if a == "P" and operation in ("all_gather", "all_to_all"):
        return "the ranks hold summands, and pieces of summands are not pieces of the sum; "
    if operation in ("all_reduce", "all_gather") and b not in "RI":
        return f"what it gives is the same on all ranks, so dst is R or I and not {b}; "
    if operation in ("reduce_scatter", "all_to_all"):
        return f"what it gives is another piece on every rank, so dst is V or S(dim) and not {b}; "
    if operation == "reinterpret":
        return "it keeps each rank's data, which is not what makes the one of the other; "
    return "it does not communicate; "


def _instead(src: SpmdType, dst: SpmdType) -> str:
    """Returns the call that converts one type into another."""
    a, b = src.letter, dst.letter
    same_dim = isinstance(src, Shard) and isinstance(dst, Shard) and src.dim == dst.dim
    if same_dim or (a == b and a != "S"):
        return f"it is {dst} already, so leave the call out" + (", or reduce it: dst=R or dst=I" if a == "P" else "")
    if a == "P":
        return f"use {'all_reduce' if b in 'RI' else 'reduce_scatter'}(x, axis, dst={dst})"
    if {a, b} == {"V", "S"}:
        return f"use convert(x, axis, src={src}, dst={dst}): the data is the same"
    if a in "VS" and b in "RI":
        summed = f", or all_reduce(x, axis, src=V, dst={dst}) if the values are to be added up"
        return f"use all_gather(x, axis, src={src}, dst={dst}){summed if a == 'V' else ''}"
    if a == b == "S":
        return f"use all_to_all(x, axis, src={src}, dst={dst})"
    if (a, b) == ("V", "P"):
        return "use reinterpret(x, axis, src=V, dst=P) if the ranks hold summands"
    expert = ", expert_mode=True" if ROWS["convert", a, b].expert else ""
    return f"use convert(x, axis, src={src}, dst={dst}{expert})"

"""`together`: an operator on several tensors, as one collective forward and one backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.overrides import has_torch_function

from .. import comm
from ..comm import Communicator
from ..comm.context import AxisLike
from ..comm.verbs.transformed_tensors import transforming
from .collectives import operator_dims
from .errors import SpmdTypeError
from .rows import ROWS, OperatorArguments, Row
from .types import SpmdType
from .watching import active

__all__ = ["together"]

Types = SpmdType | Sequence[SpmdType]
_VERBS = ("all_reduce", "all_gather", "reduce_scatter", "convert")


def together(
    operator: Callable[..., torch.Tensor], xs: Sequence[torch.Tensor], axis: AxisLike, *, src: Types, dst: Types
) -> tuple[torch.Tensor, ...]:
    """Returns `operator(x, axis, src=src, dst=dst)` of each tensor; all of one dtype travel in one collective.

    So do their gradients, once all of them are there. A checker sees an operator for each tensor, and so do
    `torch.compile` and `torch.func`. Autograd refuses to write a result in place: results may share memory.

    Args:
        operator: `all_reduce`, `all_gather`, `reduce_scatter` or `convert`.
        xs: tensors of any shapes; on all ranks equally many, of equal shapes.
        src, dst: R, I, P or S(dim) of all tensors; or one for each, which differ in their dims only.

    Raises:
        SpmdTypeError: the operator or the types are none of these.
    """
    sources, targets = ([*types] if isinstance(types, Sequence) else [types] * len(xs) for types in (src, dst))
    keys = {(operator.__name__, a.letter, b.letter) for a, b in zip(sources, targets, strict=True)}
    (key,) = keys if len(keys) == 1 else (None,)
    if not xs:
        return ()
    row = ROWS.get(key) if key is not None else None
    if row is None or row.key[0] not in _VERBS or row.expert or "V" in row.key or _scaled(sources, targets):
        raise SpmdTypeError(
            f"together({operator.__name__}, src={src}, dst={dst}): it takes {', '.join(_VERBS)} with one pair of "
            "letters of R, I, P and S for all tensors; call the operator for each tensor"
        )
    given = [*zip(xs, sources, targets, strict=True)]
    if active() is not None or transforming() or is_compiling() or has_torch_function(xs):
        return tuple(operator(x, axis, src=a, dst=b) for x, a, b in given)
    arguments = tuple(OperatorArguments(*operator_dims(operator, x, a, b, None)) for x, a, b in given)
    return _apply(row, xs, comm.communicator(axis), arguments)


def _scaled(*types: Sequence[SpmdType]) -> bool:
    return any(spmd_type.scale or spmd_type.reduction == "max" for each in types for spmd_type in each)


def _apply(
    row: Row, xs: Sequence[torch.Tensor], communicator: Communicator, arguments: tuple[OperatorArguments, ...]
) -> tuple[torch.Tensor, ...]:
    if communicator.size == 1:
        return tuple(xs)
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        result: tuple[torch.Tensor, ...] = _Together.apply(row, communicator, arguments, *xs)
        return result
    with torch.no_grad():
        return _values(row, xs, communicator, arguments)


def _values(
    row: Row, xs: Sequence[torch.Tensor], communicator: Communicator, arguments: tuple[OperatorArguments, ...]
) -> tuple[torch.Tensor, ...]:
    verb, xs = row.key[0], [*xs]
    if verb == "all_reduce":
        return tuple(comm.all_reduce(xs, communicator))
    if verb == "all_gather":
        return tuple(comm.all_gather(xs, communicator, dim=[each.src_dim for each in arguments]))
    if verb == "reduce_scatter":
        return tuple(comm.reduce_scatter(xs, communicator, dim=[each.dst_dim for each in arguments]))
    return tuple(row.value(x, communicator, each) for x, each in zip(xs, arguments))


class _Together(torch.autograd.Function):
    """Runs a row on several tensors; backward, the row that it names, on the gradients that there are."""

    @staticmethod
    def forward(
        ctx: Any, row: Row, communicator: Communicator, arguments: tuple[OperatorArguments, ...], *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.row, ctx.communicator, ctx.arguments = row, communicator, arguments
        ctx.set_materialize_grads(False)
        return _values(row, xs, communicator, arguments)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        there = {i: grad for i, grad in enumerate(grads) if grad is not None and ctx.needs_input_grad[3 + i]}
        arguments = tuple(ctx.arguments[i].reversed() for i in there)
        back = iter(_apply(ROWS[ctx.row.backward], [*there.values()], ctx.communicator, arguments))
        return (None, None, None, *(next(back) if i in there else None for i in range(len(grads))))

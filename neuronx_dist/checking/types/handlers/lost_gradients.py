"""Gradients that end at plain verbs, which have no derivative.

The result of a verb passes no gradient back to its argument. That may be meant, where a loss is summed to be printed or
the maximum of scores is only subtracted: so the call is no error. A gradient that arrives at the result is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ....call_site import call_site
from ....spmd.errors import SpmdTypeError
from ....spmd.tensor_type import Note, TensorType
from ....spmd.types import V
from ..messages.explain import shown
from ..messages.provenance import name_operands
from ..messages.trials import call_of
from ..session import Session

__all__ = ["lost_gradients", "refuse_gradient"]

_TYPED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class _Lost(torch.autograd.Function):
    """Raises for a gradient that arrives at `result`, which a verb made of `x`."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, x: Tensor, error: SpmdTypeError) -> Tensor:
        ctx.mark_dirty(result)
        ctx.error = error
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise ctx.error


def lost_gradients(
    mode: Session,
    verb: str,
    operands: Sequence[tuple[Tensor, Note]],
    types: Sequence[TensorType],
    axes: Sequence[str],
    kwargs: Mapping[str, Any],
) -> list[SpmdTypeError | None]:
    """The error for a gradient that arrives at a verb's result, for each operand; None: it needs no gradient.

    The gradient of a maximum is assumed to be 0. A result in `out=` is not changed: no expression has it.
    """
    errors: list[SpmdTypeError | None] = []
    grads = bool(axes) and torch.is_grad_enabled() and kwargs.get("out") is None
    for (x, note), type_ in zip(operands, types):
        error, op = None, kwargs.get("op")
        if grads and x.requires_grad and op in ("max", "min"):
            mode.assume(f"comm.{verb}: no gradient flows through the {op} over {axes[0]}: it is a constant")
        elif grads and x.requires_grad:
            error = _error(mode, verb, x, note, type_, axes[0])
        errors.append(error)
    return errors


def refuse_gradient(mode: Session, x: Tensor, result: Tensor, error: SpmdTypeError) -> None:
    """Makes a gradient that arrives at `result`, which a verb made of `x`, raise `error`."""
    if not result.requires_grad:
        with mode.pause(), torch.enable_grad():
            _Lost.apply(result, x, error)


def _error(mode: Session, verb: str, x: Tensor, note: Note, type_: TensorType, axis: str) -> SpmdTypeError:
    what, why = f"comm.{verb}", "a gradient arrives at its result, and plain verbs have no derivative: it is lost"
    if mode.probing:
        return SpmdTypeError(what, why, axis=axis, rule="lost_gradient")
    (named,) = name_operands([x])
    code, src, dst = named.code or "x", note.type.get(axis), type_.get(axis)
    repairs = []
    if verb in _TYPED:
        known = (None, None) if src is V else (src, dst)
        repairs.append(call_of(verb, code, axis, *known))
    repairs.append(f"comm.{verb}({code}.detach(), ...), if the gradient is to stop here")
    label = f"{what}({shown(x, note.type, named.label)}, {axis!r}) at {call_site()}"
    return SpmdTypeError(label, why, repairs=repairs, axis=axis, rule="lost_gradient")

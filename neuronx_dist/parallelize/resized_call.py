"""The arguments of a call at new sizes: integers among them are changed until its rule and torch agree.

So it is done for the local calls of ranks (`congruence.py`); here several sizes change at once, to any lengths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..checking.types.rules import RULES
from ..checking.types.rules.normal_form import normal_form
from .congruence import Arguments, Slot, edited, spec_of, tensors_of
from .derivation import whole_tensor
from .program import Call, substituted

__all__ = ["Lengths", "ResizedCall", "Shapes", "resized_call"]

Shapes = tuple[tuple[int, ...], ...]
Lengths = tuple[tuple[int, int], ...]  # of each size that changes, before and after
_META = torch.device("meta")


class ResizedCall(NamedTuple):
    """The arguments of a call at new sizes; None: there are none, and its results may have these shapes."""

    arguments: Arguments | None
    shapes: Shapes = ()


def resized_call(call: Call, arguments: Arguments, wanted: Any, shapes: Shapes, lengths: Lengths) -> ResizedCall:
    """Whether integers among the arguments can be changed so that a call has the label spec and the shapes wanted."""

    def change(x: int) -> int | None:
        for before, after in lengths:
            if x == before:
                return after
        return next((x * after // before for before, after in lengths if x * after % before == 0), None)

    others: list[Shapes] = []
    for each in edited(arguments, change):
        tensors = substituted(each, Slot, whole_tensor)
        try:
            result_shapes = _shapes(call, tensors)
            congruent = result_shapes is not None if wanted is None else _form(call, tensors) == wanted
        except Exception:  # a view of a small tensor to the whole sizes, say: whatever torch and the rule say of it
            continue
        if congruent and result_shapes in (None, shapes):
            return ResizedCall(each)
        if result_shapes not in (None, shapes):
            others.append(result_shapes)
    return ResizedCall(None, others[0] if others else ())


def _form(call: Call, tensors: Arguments) -> Any:
    return normal_form(spec_of(RULES[call.function], tensors)._replace(ranges={}))


def _shapes(call: Call, tensors: Arguments) -> Shapes | None:
    """The shapes of what a call returns, which is made on meta; None: its function has no kernel for that."""
    args, kwargs = substituted(tensors, torch.device, lambda _: _META)
    try:
        with _META:
            return tuple(tuple(x.shape) for x in tensors_of(call.function(*args, **kwargs)))
    except NotImplementedError:
        return None

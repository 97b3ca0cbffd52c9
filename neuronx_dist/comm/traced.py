"""The verbs in compiled code: operators of torch, which a compiler takes as they are.

`torch.compile` looks into the verbs and finds, in place of process groups and work objects, one operator for each
collective: `torch.ops.neuronx_dist.all_reduce(x, key, ...)`, where `key` names a communicator of this process. When the
compiled code runs, the operator calls the verb itself: same backend, same errors, same records as in eager code.

The operators are ordered: a compiler may neither drop one nor exchange two, or ranks whose programs differ (in a
constant, say) could start their collectives in different orders. Each is complete when it returns: what eager code
overlaps with computation, compiled code does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from .base import Communicator, communicators
from .errors import CommError

__all__ = ["TracedHandle", "ordered_operator", "verb_operator"]

_library = torch.library.Library("neuronx_dist", "DEF")


class TracedHandle:
    """What an asynchronous verb gives in compiled code: the result is there already."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result


def ordered_operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An operator `torch.ops.neuronx_dist.*` that compiled code executes once, in the order of the program.

    Args:
        schema: as torch writes it: `all_gather(Tensor x, str key, int dim) -> Tensor`.
        run: what it does; new tensors are its results.
        fake: makes tensors of the results' shapes, which is all that a compiler runs.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_library.ns}::{name}", fake, lib=_library)
    operator = getattr(getattr(torch.ops, _library.ns), name).default
    _register_effectful_op(operator, _EffectType.ORDERED)
    return operator


def verb_operator(
    verb: Callable[..., torch.Tensor], arguments: str, result_shape: Callable[..., Sequence[int]]
) -> Callable[..., torch.Tensor]:
    """The operator that stands for a verb.

    Args:
        verb: all but its tensor and its axis by keyword.
        arguments: which keywords the operator takes, as a schema: `int dim, str op`.
        result_shape: of the verb's result, called as the verb is, with a communicator for the axis.
    """
    name = verb.__name__
    keywords = [argument.split()[-1] for argument in arguments.split(", ")]

    def run(x: torch.Tensor, key: str, *values: Any) -> torch.Tensor:
        return verb(x, _communicator(key, name), **dict(zip(keywords, values)))

    def fake(x: torch.Tensor, key: str, *values: Any) -> torch.Tensor:
        return x.new_empty(result_shape(x, _communicator(key, name), **dict(zip(keywords, values))))

    operator: Callable[..., torch.Tensor] = ordered_operator(
        f"{name}(Tensor x, str key, {arguments}) -> Tensor", run, fake
    )
    return operator


def _communicator(key: str, verb: str) -> Communicator:
    communicator = communicators.get(key)
    if communicator is None:
        raise CommError(
            f"{verb} over {key.partition('#')[0]}: this code was compiled for a mesh that is no more; call "
            "torch.compiler.reset() and compile it again"
        )
    return communicator

"""The verbs in compiled code: operators of torch, which a compiler does not look into.

`torch.compile` traces the verbs and finds, in place of process groups and work objects, one operator for each
collective: `torch.ops.neuronx_dist.all_reduce(x, key, ...)`, where `key` names a communicator of this process. When the
compiled code runs, the operator calls the verb itself: same backend, same errors, same records as in eager code.

The operators are ordered: a compiler may neither drop one nor exchange two, or ranks whose programs differ (in a
constant, say) could start their collectives in different orders. Each is complete when it returns: compiled code does
not overlap communication with computation, as eager code does. Ranks as threads are not compiled: Dynamo has one state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...torch_internals.operators import keep_order
from ..base import Communicator, communicators
from ..errors import CommError

__all__ = ["TracedHandle", "ordered_operator", "verb_operator"]

_library = torch.library.Library("neuronx_dist", "DEF")


class TracedHandle:
    """Handle of an asynchronous verb in compiled code, where the result is complete already."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result


def ordered_operator(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Defines an operator `torch.ops.neuronx_dist.*` that compiled code runs once, in the order of the program.

    Args:
        schema: as torch writes it: `all_gather(Tensor x, str key, int dim) -> Tensor`.
        run: its implementation, which returns new tensors.
        fake: makes tensors of the results' shapes; a compiler runs only this.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_library.ns}::{name}", fake, lib=_library)
    operator = getattr(getattr(torch.ops, _library.ns), name).default
    keep_order(operator)
    return operator


def verb_operator(
    verb: Callable[..., torch.Tensor], arguments: str, result_shape: Callable[..., Sequence[int]]
) -> Callable[..., torch.Tensor]:
    """Defines the operator that stands for a verb.

    Args:
        verb: the verb; takes all but its tensor and its axis by keyword.
        arguments: the keywords of the operator, as a schema: `int dim, str op`.
        result_shape: returns the shape of the result; called like the verb, with a communicator for the axis.
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
            f"{verb} over {key.partition('#')[0]}: this code was compiled for a mesh that no longer exists; call "
            "torch.compiler.reset() and compile again"
        )
    return communicator

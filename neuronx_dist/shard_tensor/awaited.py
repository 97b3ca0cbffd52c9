"""The result of `redistribute(async_op=True)`: a ShardTensor that waits for its values when they are first asked for.

Its layout is known at once. All that travels is under way as one exchange (`other_mesh.py`), whatever the placements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm.select import in_one_program
from ..spmd.watching import active
from .handlers import FUNCTIONS
from .other_mesh import moved_to_mesh, start_move
from .pending import Pending
from .placements import Partial
from .redistribute import moved
from .spec import ShardTensorSpec, gradient_spec
from .tensor import ShardTensor, in_layout, local_of, wrap

__all__ = ["start_redistribute"]

Finish = Callable[[], torch.Tensor]


class Awaited(Pending):
    """A ShardTensor whose local tensor is on its way."""

    __slots__ = ()

    _finish: Finish

    def _values(self) -> torch.Tensor:
        local = self._finish()
        del self._finish
        return local


def start_redistribute(x: ShardTensor, target: ShardTensorSpec) -> ShardTensor:
    """`x` in the layout `target`, begun.

    Raises:
        RuntimeError: where its values are asked for: `x` was modified in place meanwhile.
        NotImplementedError: a Partial that is no sum.
    """
    for each in (*x._spec.placements, *target.placements):
        if isinstance(each, Partial) and each.reduce_op != "sum":
            raise NotImplementedError(
                f"redistribute(async_op=True) of {each!r}: only sums travel so; leave async_op out"
            )
    if active() is not None or in_one_program(x._local):  # the checker judges the moves; XLA's compiler orders them
        return wrap(moved(local_of(x), x._spec, target), target)
    source, spec, grad_enabled = local_of(x), x._spec, torch.is_grad_enabled()
    version = source._version
    move = start_move(source.detach(), spec, target)

    def finish() -> torch.Tensor:
        if source._version != version:
            raise RuntimeError("redistribute(async_op=True): the tensor was modified in place while it was travelling")
        with torch.set_grad_enabled(grad_enabled):
            return moved_to_mesh(source, spec, target, move)

    if grad_enabled and source.requires_grad:
        result = _await(source, spec, target, finish)
    else:
        result = _outlined(source, target, finish)
    result._foreign = not grad_enabled
    return result


def _outlined(source: torch.Tensor, target: ShardTensorSpec, finish: Finish) -> Awaited:
    result = Awaited.outlined(source, target)
    result._finish = finish
    return result


class _Await(torch.autograd.Function):
    """The graph that a foreign autograd function finds before the values are there."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, spec: ShardTensorSpec, target: ShardTensorSpec, finish: Finish
    ) -> Awaited:
        ctx.back = gradient_spec(target), gradient_spec(spec)
        ctx.set_materialize_grads(False)
        return _outlined(source, target, finish)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:  # the values have come, and the wrapper is linked to their graph
            return None, None, None, None
        return moved_to_mesh(in_layout(grad, ctx.back[0]), *ctx.back), None, None, None


_await: Callable[..., Awaited] = super(torch.autograd.Function, _Await).apply

FUNCTIONS[ShardTensor.redistribute] = start_redistribute

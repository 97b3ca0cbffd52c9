"""The result of `redistribute(async_op=True)`: a ShardTensor that waits for its values when they are first asked for.

Its layout is known at once. One exchange is under way (`moves/other_mesh.py`), whatever the placements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..comm.rank_selection import in_one_program
from ..spmd.watching import active
from ..torch_internals.autograd import apply_without_transforms
from ..torch_internals.tensors import make_wrapper_subclass, version_of
from .handlers import FUNCTIONS
from .moves.other_mesh import moved_to_mesh, start_move
from .moves.redistribute import moved
from .placements import Partial
from .spec import ShardTensorSpec, gradient_spec
from .tensor import ShardTensor, in_layout, local_of, wrap, written

__all__ = ["start_redistribute"]

Finish = Callable[[], torch.Tensor]


_LOCAL: Any = ShardTensor._local  # the slot


class Awaited(ShardTensor):
    """A ShardTensor whose local tensor is on its way, until it is first asked for.

    Attributes:
        _finish: waits, and returns the local tensor; None once that is here.
    """

    __slots__ = ("_finish",)

    _finish: Finish | None

    @property
    def _local(self) -> torch.Tensor:
        if self._finish is not None:
            _LOCAL.__set__(self, self._finish())
            self._finish = None
            with torch.enable_grad():
                written(self)
        local: torch.Tensor = _LOCAL.__get__(self)
        return local

    @_local.setter
    def _local(self, local: torch.Tensor) -> None:
        _LOCAL.__set__(self, local)


def start_redistribute(x: ShardTensor, target: ShardTensorSpec) -> ShardTensor:
    """Starts the move of `x` to the layout `target`.

    Raises:
        RuntimeError: where its values are asked for: `x` was modified in place meanwhile.
        NotImplementedError: a Partial that is no sum.
    """
    for placement in (*x._spec.placements, *target.placements):
        if isinstance(placement, Partial) and placement.reduce_op != "sum":
            raise NotImplementedError(
                f'redistribute(async_op=True) of {placement!r}: only Partial("sum") can be reduced '
                "asynchronously; use async_op=False"
            )
    # The checker judges the moves; XLA's compiler orders them; an awaited tensor is no `MergedShardTensor`.
    if active() is not None or in_one_program(x._local) or target.merged is not None:
        return wrap(moved(local_of(x), x._spec, target), target)
    source, spec, grad_enabled = local_of(x), x._spec, torch.is_grad_enabled()
    version = version_of(source)
    move = start_move(source.detach(), spec, target)

    def finish() -> torch.Tensor:
        if version_of(source) != version:
            raise RuntimeError(
                "redistribute(async_op=True): the input was modified in place before the transfer finished: read "
                "the result first, or clone() the input"
            )
        with torch.set_grad_enabled(grad_enabled):
            return moved_to_mesh(source, spec, target, move)

    if grad_enabled and source.requires_grad:
        result = _await(source, spec, target, finish)
    else:
        result = _outlined(source, target, finish)
    result._foreign = not grad_enabled
    return result


def _outlined(source: torch.Tensor, target: ShardTensorSpec, finish: Finish) -> Awaited:
    result: Awaited = make_wrapper_subclass(Awaited, target.shape, dtype=source.dtype, device=source.device)
    result._spec, result._finish = target, finish
    return result


class _Await(torch.autograd.Function):
    """Node of the graph that a foreign autograd function finds before the values are there."""

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


_await: Callable[..., Awaited] = apply_without_transforms(_Await)

FUNCTIONS[ShardTensor.redistribute] = start_redistribute

"""Sums gradients over the units, in buckets, and calls the hooks of users before and after.

    reducer = Reducer(parameters, cap_mb=25, in_backward=True)
    reducer.reduce()                        # after the last backward: every gradient is the sum over the units

With `in_backward` a bucket starts when its last gradient is complete. All backwards of a step but the last then run
inside of `no_sync(model)`, or of `sync_grad_when(False)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ... import comm
from ...gradients.buckets import BucketPlan, cap_in_bytes, is_anywhere
from ...gradients.data_mean import start_sum
from ...gradients.gradient import ParameterGradient
from ...gradients.in_backward import BackwardReduction, Bucket, is_late

__all__ = ["Hook", "Reducer"]

Hook = Callable[["Reducer", torch.Tensor], Any]

_CAP_ENV, _CAP_MB, _CAP_MB_IN_BACKWARD = "ALLREDUCE_BUCKET_CAP_MB", 100.0, 25.0


class Reducer:
    """Sums the gradients of some parameters over the units.

    Args:
        params: parameters without `requires_grad` are left out.
        cap_mb: MB of a bucket; None or 0: 25 in backward, else 100.
        in_backward: start in backward.

    Attributes:
        params: in order.
        pre_hooks, post_hooks: called as `hook(reducer, flat)` with the gradients of a bucket, `[elements]`, which they
            may change in place: before they are summed, and after.
    """

    def __init__(
        self, params: Iterable[torch.Tensor], *, cap_mb: float | None = None, in_backward: bool = False
    ) -> None:
        self.params = [param for param in params if param.requires_grad]
        self.pre_hooks: list[Hook] = []
        self.post_hooks: list[Hook] = []
        self._cap = cap_in_bytes(cap_mb, _CAP_ENV, _CAP_MB_IN_BACKWARD if in_backward else _CAP_MB)
        self._plan = BucketPlan()
        self._reduction = BackwardReduction(self._buckets)
        if in_backward:
            for param in self.params:
                self._reduction.watch(param)

    def reduce(self) -> None:
        """Sums every gradient over the units; a gradient that no unit has stays None."""
        self._reduction.finish()

    def drop(self) -> None:
        """Drops the reductions that backward has started, for a step that is left out."""
        self._reduction.drop()

    def apply(self, hooks: Sequence[Hook], tensors: Sequence[torch.Tensor]) -> None:
        """Calls hooks with the gradients of a bucket as one tensor."""
        if not hooks or not tensors:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        for hook in hooks:
            hook(self, flat)
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view(tensor.shape))

    def buckets(self) -> list[list[torch.Tensor]]:
        """Returns the parameters of each bucket, in order."""
        gradients = [ParameterGradient(param) for param in self.params]
        keys: list[Any] = [(gradient.dtype, gradient.param.device, is_late(gradient)) for gradient in gradients]
        nbytes = [gradient.param.numel() * gradient.dtype.itemsize for gradient in gradients]
        return [[self.params[index] for index in bucket] for bucket in self._plan.buckets(keys, nbytes, self._cap)]

    def _buckets(self) -> list[Bucket]:
        return [self._bucket([ParameterGradient(param) for param in bucket]) for bucket in reversed(self.buckets())]

    def _bucket(self, gradients: list[ParameterGradient]) -> Bucket:
        unit_grads: list[torch.Tensor | None] = []
        grads: list[torch.Tensor] = []
        units = comm.communicator("dp")

        def start() -> Any:
            unit_grads.extend(gradient.tensor for gradient in gradients)
            self.apply(self.pre_hooks, [grad for grad in unit_grads if grad is not None])
            grads.extend(gradient.zeros() if grad is None else grad for gradient, grad in zip(gradients, unit_grads))
            return start_sum(grads, [grad is not None for grad in unit_grads], units) if units.size > 1 else _Alone()

        def finish(handle: Any) -> None:
            counts = handle.wait()
            if units.size > 1:
                for gradient, unit_grad, grad, count in zip(gradients, unit_grads, grads, counts[-1]):
                    if unit_grad is None and is_anywhere(count):
                        gradient.tensor = grad
            held = [gradient.tensor for gradient in gradients]
            self.apply(self.post_hooks, [grad for grad in held if grad is not None])

        return Bucket(gradients, start, finish, in_backward=not is_late(gradients[0]))


class _Alone:
    """Handle of the sum over one unit: nothing is awaited."""

    def wait(self) -> None: ...

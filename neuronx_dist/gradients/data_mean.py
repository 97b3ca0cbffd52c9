"""Sums of gradients over the data, a bucket at a time: in backward (`overlap=True`), or after it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from .. import comm
from ..comm.rank_selection import in_one_program
from ..spmd.watching import active
from ..torch_internals.tensors import foreach_mul_
from .buckets import BucketPlan, is_anywhere, presence
from .gradient import DATA_AXES, ParameterGradient
from .in_backward import BackwardReduction, Bucket, is_late
from .reduction_plan import GradientPlan, ModelGradients

__all__ = ["MeanInBackward", "start_sum"]


def start_sum(
    grads: Sequence[torch.Tensor],
    present: Sequence[bool],
    group: comm.Communicator,
    *,
    scale: float = 1.0,
    reduce_dtype: torch.dtype | None = None,
) -> Any:
    """Starts the sum of `scale *` gradients of a bucket over a group, in place.

    Args:
        present: which gradients this rank has; the others are zeros.

    Returns:
        A handle of the gradients and, at the end, how many ranks have each.
    """
    parts = [*grads, presence(present, grads[0], group)]
    if scale != 1.0:
        foreach_mul_(parts, scale)  # before the sum: fp16 must not overflow in it
    return comm.all_reduce(parts, group, reduce_dtype=reduce_dtype, out=parts, async_op=True)


class MeanInBackward:
    """The mean over the data of a model's gradients, which starts in backward.

    Args:
        gradients: of the model, as they are now.
        cap: bytes of a bucket.
        reduce_dtype: sum in this dtype if it is wider than the gradient's.
    """

    def __init__(self, model: nn.Module, gradients: ModelGradients, cap: int, reduce_dtype: torch.dtype | None) -> None:
        self._model = ref(model)
        self._plan = gradients.plan
        self._bucket_plan = BucketPlan()
        self._cap, self._reduce_dtype = cap, reduce_dtype
        self._reduction = BackwardReduction(self._buckets)
        for gradient in gradients.gradients:
            self._reduction.watch(gradient.param)

    @staticmethod
    def of(model: nn.Module) -> MeanInBackward | None:
        """Returns the reducer installed for `model`, or None (also None under the type checker)."""
        return _MEANS.get(model) if isinstance(model, nn.Module) and active() is None else None

    @staticmethod
    def set_up(
        model: nn.Module, gradients: ModelGradients, overlap: bool, cap: int, reduce_dtype: torch.dtype | None
    ) -> None:
        """Begins, continues or ends the overlap in the following backwards.

        Raises:
            TypeError: it is to begin, and the model is no module.
        """
        if overlap and not isinstance(model, nn.Module):
            raise TypeError(
                f"reduce_gradients(overlap=True) goes on in the next backward of a model: pass the module, not "
                f"{type(model).__name__}"
            )
        known = MeanInBackward.of(model)
        overlap &= active() is None and not any(in_one_program(gradient.param) for gradient in gradients.gradients)
        if known is not None and not (overlap and known._fits(gradients.plan, cap, reduce_dtype)):
            del _MEANS[model]
            known = None
        if overlap and known is None:
            _MEANS[model] = MeanInBackward(model, gradients, cap, reduce_dtype)

    def finish(self) -> None:
        """Waits until all gradients are means."""
        self._reduction.finish()

    def _fits(self, plan: GradientPlan, cap: int, reduce_dtype: torch.dtype | None) -> bool:
        return self._plan is plan and (self._cap, self._reduce_dtype) == (cap, reduce_dtype)

    def _buckets(self) -> list[Bucket]:
        model = self._model()
        assert model is not None
        gradients = ModelGradients(model).gradients
        keys: list[Hashable] = [
            (gradient.data_axis, gradient.dtype, gradient.param.device, is_late(gradient)) for gradient in gradients
        ]
        nbytes = [gradient.param.numel() * gradient.dtype.itemsize for gradient in gradients]
        buckets = self._bucket_plan.buckets(keys, nbytes, self._cap)
        return [self._bucket([gradients[index] for index in bucket]) for bucket in reversed(buckets)]

    def _bucket(self, gradients: list[ParameterGradient]) -> Bucket:
        local_grads: list[torch.Tensor | None] = []
        grads: list[torch.Tensor] = []

        def start() -> Any:
            local_grads.extend(gradient.tensor for gradient in gradients)
            grads.extend(gradient.zeros() if grad is None else grad for gradient, grad in zip(gradients, local_grads))
            return start_sum(
                grads,
                [grad is not None for grad in local_grads],
                comm.communicator(gradients[0].data_axis),
                scale=1 / comm.size(DATA_AXES),
                reduce_dtype=self._reduce_dtype,
            )

        def finish(handle: Any) -> None:
            for gradient, local_grad, grad, flag in zip(gradients, local_grads, grads, handle.wait()[-1]):
                if local_grad is None and is_anywhere(flag):
                    gradient.tensor = grad

        return Bucket(gradients, start, finish, in_backward=not is_late(gradients[0]))


# By model, weakly.
_MEANS: WeakKeyDictionary[nn.Module, MeanInBackward] = WeakKeyDictionary()

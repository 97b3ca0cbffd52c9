"""Reductions that start while backward runs: a bucket starts when its last gradient is complete.

    reduction = BackwardReduction(buckets)      # buckets(): in the order in which they start, on all ranks the same
    reduction.watch(param)                      # each of them, once
    ...                                         # backward: hooks start one bucket after the other
    reduction.finish(store)                     # starts those that are left, and awaits all

What starts in backward is final: a gradient that is written afterwards is an error, at the next backward or at
`finish`. So all backwards of a step but the last are inside of `no_sync(model)`, which pauses the hooks.

Buckets start in one fixed order, as those of torch's DistributedDataParallel do (Li et al., 2020): a rank's autograd
may complete gradients in another order, but all ranks must start the same collective. So a bucket that lacks a gradient
holds back the later buckets, which then start after backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakMethod, ref

import torch

from .. import comm
from ..spmd.watching import active
from ..torch_internals.tensors import post_accumulate_hooks, version_of
from .buckets import overlap
from .gradient import ParameterGradient

__all__ = ["BackwardReduction", "Bucket", "is_late", "paused", "release", "start_complete"]


@dataclass
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        gradients: of the parameters.
        start: starts their reduction; returns what is awaited.
        finish: awaits it and stores the result.
        in_backward: whether backward completes the gradients. If not, a later sum completes them, over tp for instance,
            and the bucket starts after those that backward completes.
    """

    gradients: list[ParameterGradient]
    start: Callable[[], Any]
    finish: Callable[[Any], None]
    in_backward: bool = True
    handle: Any = None
    sent: list[tuple[torch.Tensor | None, int]] = field(default_factory=list)  # the gradients, and their versions

    def launch(self) -> None:
        """Starts the reduction, unless it has started."""
        if self.handle is None:
            self.handle = self.start()
            grads = [gradient.tensor for gradient in self.gradients]
            self.sent = [(grad, 0 if grad is None else version_of(grad)) for grad in grads]

    def refuse_changes(self) -> None:
        """Raises if a gradient is not the tensor that was sent."""
        for gradient, (sent, version) in zip(self.gradients, self.sent):
            grad = gradient.tensor
            if grad is not sent or (grad is not None and version_of(grad) != version):
                raise RuntimeError(
                    f"the gradient of a parameter of shape {tuple(gradient.param.shape)} was modified after its "
                    "reduction had started in backward (overlap=True), so the change would be lost. Let the "
                    "optimizer clip and scale, use a hook of the parameter, or set overlap=False"
                )


class BackwardReduction:
    """The reductions of each step, started in the step's last backward.

    Args:
        buckets: a method of the owner that makes the buckets of a step, in the order of their start. They depend on the
            parameters alone, so that they are the same on all ranks. It is held weakly, as this object is by the hooks:
            when the owner is gone, backward starts nothing.
    """

    def __init__(self, buckets: Callable[[], list[Bucket]]) -> None:
        self._buckets = WeakMethod(buckets)
        self._step: _Step | None = None
        self._pauses = 0
        self._lock = threading.RLock()  # autograd has a thread for each device

    def watch(self, param: torch.Tensor) -> None:
        """Makes backward report this parameter's gradient to this object, and to no other of this class.

        A hook that moves gradients (to `main_grad`) must be registered before.
        """
        release(param)
        param.register_post_accumulate_grad_hook(_Hook(self))

    def start(self) -> None:
        """Starts the remaining reductions: all gradients are complete."""
        with self._lock:
            self._begun().launch_all()

    def finish(self) -> None:
        """Starts the remaining reductions, stores all results, and ends the step.

        Raises:
            RuntimeError: a gradient was written after its reduction had started.
        """
        step, self._step = self._begun(), None
        for bucket in step.buckets:
            if bucket.handle is not None:
                bucket.refuse_changes()
        overlap(step.buckets, Bucket.launch, lambda bucket, _: bucket.finish(bucket.handle))

    def drop(self) -> None:
        """Ends a skipped step: awaits the reductions that have started, and discards their results."""
        step, self._step = self._step, None
        if step is not None:
            step.launch_all()  # other ranks may have started more
            for bucket in step.buckets:
                bucket.handle.wait()

    def _begun(self) -> _Step:
        if self._step is None:
            buckets = self._buckets()
            assert buckets is not None  # the owner of this object has its method
            self._step = _Step(buckets())
        return self._step

    @torch.no_grad()
    def accumulated(self, param: torch.Tensor) -> None:
        """Records that backward has added to a gradient. In a type check the step starts all reductions."""
        if self._pauses or active() is not None:
            return
        with self._lock:
            if self._step is not None and self._step.was_left_out(param):
                self.drop()
            self._begun().accumulated(param)


class _Step:
    """The buckets of one step, in the order of their start."""

    def __init__(self, buckets: list[Bucket]) -> None:
        early = [bucket for bucket in buckets if bucket.in_backward]
        self.buckets = [*early, *(bucket for bucket in buckets if not bucket.in_backward)]
        self._number = {id(gradient.param): i for i, bucket in enumerate(self.buckets) for gradient in bucket.gradients}
        self._missing = [len(bucket.gradients) for bucket in early]
        self._next = 0
        self._arrived: dict[int, torch.Tensor | None] = {}  # by parameter, of the buckets that start in backward

    def was_left_out(self, param: torch.Tensor) -> bool:
        """Returns whether this parameter's gradient of this step was cleared without a step."""
        arrived = self._arrived.get(id(param))
        return arrived is not None and arrived is not ParameterGradient(param).tensor

    def accumulated(self, param: torch.Tensor) -> None:
        """Records the gradient of `param`, and starts all complete buckets, in their order.

        Raises:
            RuntimeError: it was there already.
        """
        number = self._number.get(id(param))
        if number is None:
            return
        if id(param) in self._arrived or self.buckets[number].handle is not None:
            raise RuntimeError(
                f"backward has added to the gradient of a parameter of shape {tuple(param.shape)} after its reduction "
                f"over the data may have started (overlap=True). If this is another backward of one step, make all but "
                f"the last inside of `with neuronx_dist.no_sync(model):`. If a step was left out, clear the gradients "
                f"by the optimizer's zero_grad(). If a layer that is used several times is checkpointed, pass "
                f"use_reentrant=False"
            )
        if number >= len(self._missing):
            return
        self._arrived[id(param)] = ParameterGradient(param).tensor
        self._missing[number] -= 1
        while self._next < len(self._missing) and not self._missing[self._next]:
            self.buckets[self._next].launch()
            self._next += 1

    def launch_all(self) -> None:
        for bucket in self.buckets:
            bucket.launch()


class _Hook:
    """Reports a gradient to a reduction, by a weak reference."""

    def __init__(self, reduction: BackwardReduction) -> None:
        self.reduction = ref(reduction)

    def __call__(self, param: torch.Tensor) -> None:
        reduction = self.reduction()
        if reduction is not None:
            reduction.accumulated(param)


def _hooks(param: torch.Tensor) -> dict[int, _Hook]:
    hooks = post_accumulate_hooks(param)
    return {key: hook for key, hook in hooks.items() if isinstance(hook, _Hook)} if hooks else {}


def is_late(gradient: ParameterGradient) -> bool:
    """Returns whether a sum follows backward: over tp, or over the stages that hold a tied weight.

    On a pipeline any parameter may be late, unless it has the attribute `complete_in_backward = True`.
    """
    may_be_tied = comm.size("pp") > 1 and not getattr(gradient.param, "complete_in_backward", False)
    return may_be_tied or (gradient.is_partial_over_tp and comm.size("tp") > 1)


def release(param: torch.Tensor) -> None:
    """Stops reporting this parameter's gradients."""
    hooks = post_accumulate_hooks(param) or {}
    for key in _hooks(param):
        del hooks[key]


def start_complete(params: Iterable[torch.Tensor]) -> None:
    """Starts the reductions of these parameters, whose gradients are complete. In a type check the step starts them."""
    for reduction in _reductions_of(params):
        reduction.start()


@contextmanager
def paused(params: Iterable[torch.Tensor]) -> Iterator[None]:
    """Starts no reduction in the backwards inside, where gradients are not complete yet."""
    reductions = _reductions_of(params)
    for reduction in reductions:
        reduction._pauses += 1
    try:
        yield
    finally:
        for reduction in reductions:
            reduction._pauses -= 1


def _reductions_of(params: Iterable[torch.Tensor]) -> list[BackwardReduction]:
    """The reductions that receive the gradients of these parameters, in the order of the parameters."""
    if active() is not None:
        return []
    known = (hook.reduction() for param in params for hook in _hooks(param).values())
    return list(dict.fromkeys(reduction for reduction in known if reduction is not None))

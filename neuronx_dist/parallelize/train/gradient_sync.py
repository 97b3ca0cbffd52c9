"""The gradients of an optimizer during a step: of each unit, then summed over the units, scaled, clipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from ... import comm
from ...gradients.gradient import ParameterGradient, gradient_of, parameters_of
from ...gradients.in_backward import paused
from ...gradients.norm import clip_grads_with_norm, norm_groups, norm_of, scale_grads
from ...gradients.state import is_summed_over_units, mark_summed_over_units
from ...mesh import Mesh
from ...optimizer.zero1 import NeuronZero1Optimizer
from .reducer import Hook, Reducer

__all__ = ["GradientSync", "ShardedSync"]


class GradientSync:
    """The gradients of a plain optimizer, which are summed in place.

    Args:
        reducers: the reducers of all its parameters.
    """

    def __init__(self, reducers: Sequence[Reducer]) -> None:
        self.reducers = reducers
        self._is_done = False
        self._suspensions = 0
        for reducer in reducers:
            for param in reducer.params:
                param.register_post_accumulate_grad_hook(_refuse_summed)

    # --- the parts of a step ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins a new step: present and coming gradients are not summed."""
        self._is_done = False
        for reducer in self.reducers:
            reducer.drop()
        for grad in self._held():
            mark_summed_over_units(grad, False)

    @torch.no_grad()
    def synchronise(self) -> None:
        """Sums the gradients over the units, unless they were summed since the last backward."""
        if self._suspensions or (self._is_done and all(map(is_summed_over_units, self._held()))):
            return
        self._is_done = False
        with _some_mesh():
            self._sum()
        self._is_done = True
        for grad in self._held():
            mark_summed_over_units(grad, True)

    def step_is_done(self) -> None:
        """Notes that the optimizer has used the gradients."""

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiplies the summed gradients.

        Raises:
            RuntimeError: the gradients are not summed.
        """
        if not self._is_done:
            raise RuntimeError(
                "scale_grads: the gradients are not summed over the units yet: call sync_shard_grad() first"
            )
        scale_grads(self._owners(), factor)

    def clip(self, max_norm: float | None) -> torch.Tensor:
        """Clips the summed gradients of the whole model to `max_norm`, and returns their norm before that."""
        if self._suspensions:
            raise RuntimeError(
                "clip_gnorm: gradients are not summed over the units inside sync_grad_when(False): call it outside"
            )
        self.synchronise()
        with _some_mesh():
            norm = self._norm()
        return clip_grads_with_norm(self._owners(), norm, float("inf") if max_norm is None else max_norm)

    def add_pre_hook(self, hook: Hook) -> None:
        for reducer in self.reducers:
            reducer.pre_hooks.append(hook)

    def add_post_hook(self, hook: Hook) -> None:
        for reducer in self.reducers:
            reducer.post_hooks.append(hook)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspends summing inside of the context."""
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1

    # --- the gradients ------------------------------------------------------------------------------------------------

    def _params(self) -> list[torch.Tensor]:
        return [param for reducer in self.reducers for param in reducer.params]

    def _held(self) -> list[torch.Tensor]:
        return [grad for param in self._params() if (grad := gradient_of(param)) is not None]

    def _owners(self) -> list[torch.Tensor]:
        """Returns the tensors that have the summed gradients."""
        return self._params()

    def _sum(self) -> None:
        for reducer in self.reducers:
            reducer.reduce()

    def _norm(self) -> torch.Tensor:
        params = parameters_of(self._params())
        return norm_of(params, [gradient_of(param) for param in params], 2.0, norm_groups(False, None))[0]


class ShardedSync(GradientSync):
    """The gradients of a ZeRO-1 optimizer: each rank has the sums for its shards."""

    def __init__(self, optimizer: NeuronZero1Optimizer, reducers: Sequence[Reducer]) -> None:
        super().__init__(reducers)
        self.optimizer = optimizer
        self._pause = ExitStack()

    def add_pre_hook(self, hook: Hook) -> None:
        """Adds a hook; reductions start after backward from now on, so that hooks see buckets of complete gradients."""
        if not any(reducer.pre_hooks for reducer in self.reducers):
            self._pause.enter_context(paused(self._params()))
        super().add_pre_hook(hook)

    def step_is_done(self) -> None:
        self._is_done = False  # the shards' gradients are gone

    def _owners(self) -> list[torch.Tensor]:
        return [shard.master for shard in self.optimizer.shards]

    def _sum(self) -> None:
        for reducer in self.reducers:
            for bucket in reducer.buckets():
                reducer.apply(reducer.pre_hooks, _grads_of(bucket))
        self.optimizer.reduce_scatter()
        masters = {id(shard.param): shard.master for shard in self.optimizer.shards}
        for reducer in self.reducers:
            for bucket in reducer.buckets():
                reducer.apply(reducer.post_hooks, _grads_of([masters[id(param)] for param in bucket]))

    def _norm(self) -> torch.Tensor:
        shards = self.optimizer.shards
        grads = [shard.master.grad for shard in shards]
        replicas = [shard.replicas for shard in shards]
        return norm_of([shard.param for shard in shards], grads, 2.0, ["world"], replicas=replicas)[0]


def _grads_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [grad for tensor in tensors if (grad := gradient_of(tensor)) is not None]


def _refuse_summed(param: torch.Tensor) -> None:
    """Raises RuntimeError if backward has added to a summed gradient."""
    grad = ParameterGradient(param).tensor
    if grad is not None and is_summed_over_units(grad):
        raise RuntimeError(
            f"backward added to a gradient that was already summed over the units (parameter of shape "
            f"{tuple(param.shape)}): call optimizer.zero_grad() before the next step, and accumulate inside "
            "`with sync_grad_when(False):`"
        )


def _some_mesh() -> AbstractContextManager[Any]:
    """Returns a context with the current mesh, or with a mesh of one rank where there is none."""
    return ExitStack() if comm.is_initialized() else comm.as_rank(Mesh(1), 0)

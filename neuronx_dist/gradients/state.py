"""The record of the reductions that a gradient has been through in this step.

    left = left_to_reduce(grads, "data")       # the gradients not reduced yet; raises at a second call
    with keeping_reductions(left):
        ...                                    # sums them over the mesh, in place
    mark_reduced(grads, "data")

A gradient that is written anywhere else, by backward for instance, counts as a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..torch_internals.tensors import version_of

__all__ = [
    "ReductionState",
    "is_summed_over_units",
    "keeping_reductions",
    "left_to_reduce",
    "mark_reduced",
    "mark_step",
    "mark_summed_over_units",
    "refuse_averaged",
    "refuse_reduced",
]

_SUMMED = "_nxd_summed_over_units"
_ATTRIBUTE = "_nxd_reduction_state"
_NONE: frozenset[str] = frozenset()


class ReductionState(NamedTuple):
    """The reductions that a gradient has been through since the last backward.

    The state is an attribute of the gradient's tensor, because NxD's functions receive gradients without their
    parameters. It is valid as long as the tensor's version counter is unchanged: backward and `zero_grad` make a new
    tensor or a new version, and thereby end it.

    Attributes:
        version: the tensor's version counter when the state was written.
        stages: "tp", "cp", "data" and "ep" are the sums and means of NxD's functions; "step" is `reduce_gradients`.
        unasked: `stages` that `reduce_gradients` did, and for which NxD's function has not been called yet. Scripts for
            NxD call it after `run_train`: the first call has nothing left to do.
    """

    version: int
    stages: frozenset[str]
    unasked: frozenset[str]

    @staticmethod
    def of(grad: torch.Tensor) -> ReductionState:
        """The state of a gradient as it is now."""
        state: ReductionState | None = getattr(grad, _ATTRIBUTE, None)
        if state is None or state.version != version_of(grad):
            return ReductionState(version_of(grad), _NONE, _NONE)
        return state

    @staticmethod
    def has_been_on(grad: torch.Tensor) -> bool:
        """Returns whether a tensor has been through a reduction, in this step or before its memory was written anew."""
        return hasattr(grad, _ATTRIBUTE)

    @classmethod
    def write(cls, grad: torch.Tensor, stages: frozenset[str], unasked: frozenset[str]) -> None:
        """Records that the present gradient has been through these stages."""
        setattr(grad, _ATTRIBUTE, cls(version_of(grad), stages, unasked))


def refuse_reduced(grads: Iterable[torch.Tensor]) -> None:
    """Raises if a gradient has been through any reduction.

    Raises:
        RuntimeError: it has; the message names what was done, and the calls that may have done it.
    """
    for grad in grads:
        done = ReductionState.of(grad).stages
        if done:
            raise RuntimeError(
                f"gradients were reduced already in this step (done: {', '.join(sorted(done))}); reducing them again "
                "would scale them. Call reduce_gradients once after the last backward, and not after "
                "NxDPPModel.run_train, which calls it; call zero_grad before the next step"
            )


def refuse_averaged(grads: Iterable[torch.Tensor]) -> None:
    """Raises a RuntimeError if a gradient of experts is averaged already, before an optimizer that sums over edp."""
    if any({"data", "ep"} & ReductionState.of(grad).stages for grad in grads):
        raise RuntimeError(
            "the gradients of experts were averaged over the data ranks already, and this optimizer would sum them "
            "again: call reduce_gradients(model, average_over_data=False), and build NxDPPModel with "
            "use_zero1_optimizer=True"
        )


def left_to_reduce(grads: Sequence[torch.Tensor], stage: str) -> list[torch.Tensor]:
    """Returns the gradients that have not been through `stage`.

    Raises:
        RuntimeError: a gradient has, at an earlier call for this stage in the step.
    """
    left = []
    for grad in grads:
        state = ReductionState.of(grad)
        if stage not in state.stages:
            left.append(grad)
        elif stage not in state.unasked:
            raise RuntimeError(
                f"gradients were reduced already in this step (done: {', '.join(sorted(state.stages))}), and this is "
                f"the second call for {stage!r}: reducing them again would scale them. Make each call of a reduction "
                "once after the last backward; call zero_grad before the next step"
            )
    return left


def mark_reduced(grads: Iterable[torch.Tensor], stage: str) -> None:
    """Records that gradients have been through `stage`, at the caller's request."""
    for grad in grads:
        state = ReductionState.of(grad)
        ReductionState.write(grad, state.stages | {stage}, state.unasked - {stage})


def mark_step(grads: Iterable[torch.Tensor], stages: frozenset[str]) -> None:
    """Records that `reduce_gradients` has done `stages`, which no caller has requested yet."""
    for grad in grads:
        ReductionState.write(grad, stages | {"step"}, stages)


@contextmanager
def keeping_reductions(grads: Iterable[torch.Tensor]) -> Iterator[None]:
    """Treats in-place writes of the gradients inside as part of the same backward."""
    states = [(grad, state) for grad in grads if (state := ReductionState.of(grad)).stages]
    yield
    for grad, state in states:
        ReductionState.write(grad, state.stages, state.unasked)


def mark_summed_over_units(grad: torch.Tensor, is_summed: bool) -> None:
    """Records whether a gradient of a `parallelize` module is a sum over units; in-place writes do not change that."""
    setattr(grad, _SUMMED, is_summed)


def is_summed_over_units(grad: torch.Tensor) -> bool:
    """Returns whether `build_optimizer` has summed a gradient over the units."""
    return getattr(grad, _SUMMED, False)

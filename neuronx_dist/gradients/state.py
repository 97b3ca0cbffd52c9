"""Which reductions a gradient has been through in this step.

    refuse_reduced(grads, {"data", "step"})    # raises if one of these was done already
    with keeping_reductions(grads):
        ...                                    # sums them over the mesh, in place
    mark_reduced(grads, "data")

A gradient that is written anywhere else, by backward for instance, counts as a new one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import NamedTuple

import torch

__all__ = ["ReductionState", "keeping_reductions", "mark_reduced", "refuse_reduced"]

_ATTRIBUTE = "_nxd_reduction_state"
_NO_STAGES: frozenset[str] = frozenset()


class ReductionState(NamedTuple):
    """The reductions that a gradient has been through since the last backward.

    It is an attribute of the gradient's tensor, because NxD's functions are given gradients without their parameters.
    It holds as long as the tensor has the version counter that it had then. Backward and `zero_grad` make a new tensor
    or a new version, and so take the state away.

    Attributes:
        version: the tensor's version counter when the state was written.
        stages: "tp", "cp", "data" and "ep" are the sums and means of NxD's functions, "step" is `reduce_gradients`.
    """

    version: int
    stages: frozenset[str]

    @staticmethod
    def stages_of(grad: torch.Tensor) -> frozenset[str]:
        """The stages that a gradient has been through since the last backward."""
        state: ReductionState | None = getattr(grad, _ATTRIBUTE, None)
        return state.stages if state is not None and state.version == grad._version else _NO_STAGES

    @classmethod
    def write(cls, grad: torch.Tensor, stages: frozenset[str]) -> None:
        """Says that the gradient, as it is now, has been through these stages."""
        setattr(grad, _ATTRIBUTE, cls(grad._version, stages))


def refuse_reduced(grads: Iterable[torch.Tensor], stages: Set[str] | None = None) -> None:
    """Raises if a gradient has been through one of `stages`; None: through any.

    Raises:
        RuntimeError: it has; the message names what was done, and the calls that may have done it.
    """
    for grad in grads:
        done = ReductionState.stages_of(grad)
        if done and (stages is None or done & stages):
            raise RuntimeError(
                f"gradients were reduced already in this step (done: {', '.join(sorted(done))}); reducing them again "
                "would scale them. Call reduce_gradients once after the last backward, and not after "
                "NxDPPModel.run_train, which calls it; call zero_grad before the next step"
            )


def mark_reduced(grads: Iterable[torch.Tensor], stage: str) -> None:
    """Notes that gradients have been through `stage`."""
    for grad in grads:
        ReductionState.write(grad, ReductionState.stages_of(grad) | {stage})


@contextmanager
def keeping_reductions(grads: Iterable[torch.Tensor]) -> Iterator[None]:
    """Writing the gradients in place in here does not count as a new backward."""
    reduced = [(grad, stages) for grad in grads if (stages := ReductionState.stages_of(grad))]
    yield
    for grad, stages in reduced:
        ReductionState.write(grad, stages)

"""Which schedule a step of training runs: the one place that the layout, the check and the model ask."""

from __future__ import annotations

from .one_f_one_b import OneFOneB
from .schedule import Schedule

__all__ = ["training_schedule"]


_FEW_SENDS = 2  # one that is under way while the next is computed


def training_schedule(num_stages: int, num_microbatches: int, *, deallocate: bool = False) -> Schedule:
    """The schedule of `NxDPPModel.run_train`.

    Args:
        deallocate: free what was sent as soon as it has arrived (`NxDPPModel.deallocate_pipeline_outputs`).

    Raises:
        ValueError: there is no stage, or no microbatch.
    """
    return OneFOneB(num_stages, num_microbatches, max_forward_sends=_FEW_SENDS if deallocate else None)

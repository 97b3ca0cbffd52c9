"""Which schedule a step of training runs: the one place that the layout, the check and the model ask."""

from __future__ import annotations

from .one_f_one_b import OneFOneB
from .schedule import Schedule

__all__ = ["training_schedule"]


def training_schedule(num_stages: int, num_microbatches: int) -> Schedule:
    """The schedule of `NxDPPModel.run_train`.

    Raises:
        ValueError: there is no stage, or no microbatch.
    """
    return OneFOneB(num_stages, num_microbatches)

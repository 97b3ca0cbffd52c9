"""Which schedule a step of training runs: the one place that the layout, the check and the model ask."""

from __future__ import annotations

from collections.abc import Callable

from .one_f_one_b import OneFOneB
from .schedule import Schedule

__all__ = ["training_schedule"]


_FEW_SENDS = 2  # one that is under way while the next is computed


def training_schedule(
    num_stages: int,
    num_microbatches: int,
    *,
    schedule: str | Schedule | Callable[[int, int], Schedule] | None = None,
    num_chunks: int = 1,
    deallocate: bool = False,
) -> Schedule:
    """The schedule of `NxDPPModel.run_train`.

    Args:
        deallocate: free what was sent as soon as it has arrived (`NxDPPModel.deallocate_pipeline_outputs`).

    Raises:
        ValueError: there is no stage, or no microbatch.
    """
    if schedule is None and num_chunks == 1 or schedule == "1f1b":
        return OneFOneB(num_stages, num_microbatches, max_forward_sends=_FEW_SENDS if deallocate else None)
    if isinstance(schedule, Schedule):
        return schedule
    assert callable(schedule)
    return schedule(num_stages, num_microbatches)

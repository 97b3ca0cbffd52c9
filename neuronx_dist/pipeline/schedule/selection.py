"""The schedule of a training step, by name: layout, check and model all ask here."""

from __future__ import annotations

from collections.abc import Callable

from .gpipe import GPipe
from .interleaved import Interleaved
from .one_f_one_b import OneFOneB
from .schedule import Schedule
from .tasks import counted
from .zb_h1 import ZeroBubbleH1
from .zb_v import ZeroBubbleV

__all__ = ["NAMES", "ScheduleChoice", "check_sizes", "training_schedule"]

NAMES = ("1f1b", "interleaved", "gpipe", "zb_h1", "zb_v")

ScheduleChoice = str | Schedule | Callable[[int, int], Schedule]


def training_schedule(
    num_stages: int,
    num_microbatches: int,
    *,
    schedule: ScheduleChoice | None = None,
    num_chunks: int = 1,
    deallocate: bool = False,
) -> Schedule:
    """The schedule of `NxDPPModel.run_train`.

    Args:
        schedule: a name of `NAMES`, a schedule, or a function `(num_stages, num_microbatches) -> Schedule`. None: 1F1B,
            or interleaved 1F1B with several chunks.
        num_chunks: pieces of the model on each stage. 1 goes with every schedule but an interleaved one: "zb_v" and a
            `Schedule` object have their own number.
        deallocate: free sent tensors as soon as they have arrived (`NxDPPModel.deallocate_pipeline_outputs`). A
            `Schedule` object itself says how many sends are under way.

    Raises:
        ValueError: no schedule has the name; the schedule is for other sizes, or has no backwards; there is no stage,
            no microbatch or no chunk.
        TypeError: `schedule` is none of these, or its function returns something else.
    """
    if num_chunks < 1:
        raise ValueError(f"num_chunks must be at least 1, got {num_chunks}")
    if schedule is None:
        schedule = "1f1b" if num_chunks == 1 else "interleaved"
    if isinstance(schedule, str):
        chosen = _by_name(schedule, num_stages, num_microbatches, num_chunks, deallocate)
    else:
        chosen = schedule if isinstance(schedule, Schedule) else _made_by(schedule, num_stages, num_microbatches)
    check_sizes(chosen, num_stages, num_microbatches, num_chunks)
    if not chosen.trains:
        raise ValueError(f"{chosen} has no backwards, so it cannot train")
    return chosen


def _by_name(name: str, num_stages: int, num_microbatches: int, num_chunks: int, deallocate: bool) -> Schedule:
    if name == "1f1b":
        return OneFOneB(num_stages, num_microbatches, deallocate=deallocate)
    if name == "interleaved":
        return Interleaved(num_stages, num_microbatches, num_chunks, deallocate=deallocate)
    if name == "gpipe":
        return GPipe(num_stages, num_microbatches, deallocate=deallocate)
    if name == "zb_h1":
        return ZeroBubbleH1(num_stages, num_microbatches, deallocate=deallocate)
    if name == "zb_v":
        return ZeroBubbleV(num_stages, num_microbatches, deallocate=deallocate)
    raise ValueError(f"there is no schedule {name!r}; there are {', '.join(map(repr, NAMES))}")


def _made_by(make: Callable[[int, int], Schedule], num_stages: int, num_microbatches: int) -> Schedule:
    if not callable(make):
        raise TypeError(
            f"a schedule is one of {', '.join(map(repr, NAMES))}, a Schedule, or a function of "
            f"(num_stages, num_microbatches) that returns one, got {make!r}"
        )
    schedule = make(num_stages, num_microbatches)
    if not isinstance(schedule, Schedule):
        raise TypeError(f"{make!r} must return a Schedule, got {schedule!r}")
    return schedule


def check_sizes(schedule: Schedule, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> None:
    """Checks the sizes of a schedule; `num_chunks=1` goes with any schedule.

    Raises:
        ValueError: the schedule is for other sizes.
    """
    if (schedule.num_stages, schedule.num_microbatches) != (num_stages, num_microbatches):
        raise ValueError(
            f"{schedule} does not fit {counted(num_stages, 'stage')} and {counted(num_microbatches, 'microbatch')}: "
            "create it for these sizes, or pass a function of both that returns it"
        )
    if num_chunks not in (1, schedule.num_chunks):
        fits = "1" if schedule.num_chunks == 1 else f"{schedule.num_chunks} (or 1, its default)"
        raise ValueError(
            f"{schedule} has {counted(schedule.num_chunks, 'chunk')} on each stage, not {num_chunks} "
            f"(virtual_pipeline_size): use {fits}; schedule='interleaved' takes any number"
        )

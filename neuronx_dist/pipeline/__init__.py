"""Pipeline parallelism: record a forward, cut it into stages, and run them by a schedule.

schedule/        what each stage does, in which order: pure Python
cut/             a recording in stages; a stage as a function
run/             a schedule executed on one rank
stage_module.py  a module of which this rank has a part; cut_module.py: divided among stages; model.py: `NxDPPModel`
manual_pipe_stage.py  a model given as a list of layers
timeline/        pictures of schedules and of recorded steps
options.py       checks of the arguments of `NxDPPModel`; partition.py: NxD's import path
"""

from ..lazy_names import lazy_names
from .schedule import (
    Costs,
    GPipe,
    Inference,
    Interleaved,
    Kind,
    OneFOneB,
    Schedule,
    Task,
    WrittenSchedule,
    ZeroBubbleH1,
    ZeroBubbleV,
    format_schedule,
    rounds,
    simulate,
)

# Name -> its module, loaded when first asked for: a layout asks a schedule without torch.
_LAZY = {
    "NxDPPModel": "pipeline.model",
    "PipelineStageModule": "pipeline.manual_pipe_stage",
    "TracingError": "program.recording",
    "create_partitions": "pipeline.cut.cuts",
}

__all__ = [
    "Costs",
    "GPipe",
    "Inference",
    "Interleaved",
    "Kind",
    "OneFOneB",
    "Schedule",
    "Task",
    "WrittenSchedule",
    "ZeroBubbleH1",
    "ZeroBubbleV",
    "format_schedule",
    "rounds",
    "simulate",
    *_LAZY,
]

__getattr__ = lazy_names(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)

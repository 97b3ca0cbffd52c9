"""Pipeline parallelism: record a forward, cut it into stages, and run them by a schedule.

schedule/        what each stage does, in which order: pure Python
cut/             a recording in stages; a stage as a function
run/             a schedule executed on one rank
stage_module.py  a module of which this rank has a part; cut_module.py: divided among stages; model.py: `NxDPPModel`
manual_pipe_stage.py  a model given as a list of layers
timeline/        pictures of schedules and of recorded steps
options.py       checks of the arguments of `NxDPPModel`; partition.py: NxD's import path; comm.py: its messages

A model is recorded (`program/`) and cut into `stages * chunks` pieces. `Schedule.holder` alone says which stage holds
which piece, and so where the loss is (on stage 0, if pieces are placed as a V) and which stages share a weight.
Runtime, layout, memory prediction and check all ask the `Schedule`. It is played once on the strictest transport
(`prove`) before it runs, so that no stage waits for ever. The recording has all shapes, so that ranks exchange none.

Before there is a recording, layers are assumed to run in the order of registration. This placement is *open*:
`trace()`, or the first run, replaces it, unless a caller has read the model's parameters. Where the order is
doubtful, since a norm or a head is registered before the transformer layers, the constructor records the forward on
ids `[1, 8]` of its `input_names`.
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

"""A step, simulated or recorded, as bars of time by stage; bubble and memory follow from the bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..schedule import Costs, Schedule, TimedTask, simulate
from ..schedule.analysis import MemoryInUse, bubble_of, memory_of
from ..schedule.tasks import counted

__all__ = ["LEGEND", "Chart", "number", "simulated", "text"]

LEGEND = (
    "F forward, B backward, I backward of inputs, W backward of weights, then the microbatch; lower case: a later "
    "chunk; -: the task goes on; .: idle"
)


@dataclass(frozen=True)
class Chart:
    """A step of all stages of a pipeline.

    Attributes:
        name: of the schedule, or of the recorded step.
        stages: the bars of each stage, in the order of time. The first bar of all begins at 0.
        unit: of time: "ms", or "" where a forward or half of a backward takes about 1.
    """

    name: str
    stages: Sequence[Sequence[TimedTask]]
    unit: str = ""

    @property
    def step_time(self) -> float:
        """Time from the first task of any stage to the end of the last."""
        return max((bar.end for bars in self.stages for bar in bars), default=0.0)

    @property
    def bubble(self) -> float:
        """Share of the step in which a stage computes nothing, on average over stages."""
        return bubble_of(self.stages)

    @property
    def num_microbatches(self) -> int:
        return 1 + max((bar.task.microbatch for bars in self.stages for bar in bars), default=-1)

    @property
    def num_chunks(self) -> int:
        return 1 + max((bar.task.chunk for bars in self.stages for bar in bars), default=0)

    def memory(self, stage: int) -> list[MemoryInUse]:
        """Number of microbatches of which a stage keeps activations, as changes over time.

        A chunk counts as its share of the stage's layers, so that charts with different numbers of chunks compare.
        """
        return memory_of(stage, self.stages[stage], Costs(activation=1 / self.num_chunks))

    @property
    def keeps_activations(self) -> bool:
        """Returns whether there are backwards, for which activations are saved."""
        return any(self.peak(stage) for stage in range(len(self.stages)))

    def peak(self, stage: int) -> float:
        """The most microbatches whose activations a stage keeps at one time."""
        return max(amount for _, amount in self.memory(stage))

    def summary(self) -> str:
        """Bubble, step time and memory, on one line."""
        unit = f" {self.unit}" if self.unit else ""
        peak = max(self.peak(stage) for stage in range(len(self.stages)))
        memory = f", peak memory {counted(number(peak), 'microbatch')}" if peak else ""
        return f"bubble {self.bubble:.1%}, step {number(self.step_time)}{unit}{memory}"

    def shape(self) -> str:
        """Stages, chunks and microbatches, in words."""
        chunks = f" × {self.num_chunks} chunks" if self.num_chunks > 1 else ""
        return f"{counted(len(self.stages), 'stage')}{chunks}, {counted(self.num_microbatches, 'microbatch')}"


def simulated(name: str, schedule: Schedule, costs: Costs, unit: str = "") -> Chart:
    """The chart of a schedule, by `simulate`.

    Args:
        costs: numbers, of all chunks of a stage together: a chunk takes its share, so that schedules with different
            numbers of chunks compare.

    Raises:
        RuntimeError: the schedule cannot run; see `simulate`.
    """
    computing = ("forward", "backward_input", "backward_weight")
    share = {name: getattr(costs, name) / schedule.num_chunks for name in computing}
    return Chart(name, simulate(schedule, replace(costs, **share)).timeline, unit)


def number(value: float) -> str:
    """A number as text: about three significant digits, without trailing zeros."""
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def text(chart: Chart, width: int = 120) -> str:
    """Returns the chart in at most `width` columns, without the peak after a stage's row.

    A task is printed as `F3` if that fits, else as its letter; small letters are later chunks, points are idle time.
    """
    bars = [bar for row in chart.stages for bar in row]
    shortest = min((bar.end - bar.start for bar in bars if bar.end > bar.start), default=1.0)
    digits = len(str(max(0, chart.num_microbatches - 1)))
    label = f"stage {len(chart.stages) - 1} "
    columns = max(1, min(width - len(label) - 1, round(chart.step_time / shortest * (digits + 1))))
    per_time = columns / (chart.step_time or 1.0)
    lines = [f"{chart.name}: {chart.shape()}: {chart.summary()}"]
    for stage, row in enumerate(chart.stages):
        cells = ["."] * columns
        for task, start, end in row:
            begin = round(start * per_time)
            wide = max(1, round(end * per_time) - begin)
            letter = task.kind.value.lower() if task.chunk else task.kind.value
            word = f"{letter}{task.microbatch}"
            cells[begin : begin + wide] = (word if len(word) <= wide else letter).ljust(wide, "-")[:wide]
        peak = f"  peak {number(chart.peak(stage))}" if chart.keeps_activations else ""
        lines.append(f"{f'stage {stage}':<{len(label)}}{''.join(cells[:columns])}{peak}")
    return "\n".join(lines)

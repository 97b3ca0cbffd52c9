"""A chart for a terminal: a line for each stage, a column or more for each task."""

from __future__ import annotations

from .chart import Chart, number

__all__ = ["LEGEND", "text"]

LEGEND = (
    "F forward, B backward, I backward of inputs, W backward of weights, then the microbatch; lower case: a later "
    "chunk; -: the task goes on; .: idle"
)


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

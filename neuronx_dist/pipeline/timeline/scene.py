"""Charts as shapes on a canvas, computed once: SVG, HTML and PNG only write them down.

One chart below the other, on a common axis of time. A chart has a row of bars for each stage, and under it the memory
of the stage as an area; all areas have one scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ..schedule import Kind, Task, TimedTask
from .chart import Chart, number

__all__ = ["COLOURS", "DARK", "LIGHT", "Area", "Label", "Rectangle", "Scene", "draw", "text_colour"]

# Okabe and Ito's colours, which people with any colour vision tell apart; a later chunk is lighter.
COLOURS = {
    Kind.FORWARD: "#0072b2",
    Kind.BACKWARD: "#d55e00",
    Kind.BACKWARD_INPUT: "#e69f00",
    Kind.BACKWARD_WEIGHT: "#009e73",
}
WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward, inputs",
    Kind.BACKWARD_WEIGHT: "backward, weights",
}
# Colours that the theme of a page decides.
LIGHT = {
    "page": "#ffffff",
    "ink": "#1d2733",
    "muted": "#5f6b7a",
    "line": "#d5dae1",
    "idle": "#f3f5f8",
    "hatch": "#dfe4ea",
    "memory": "#c3cbd8",
    "memory-line": "#7d8aa0",
}
DARK = {
    "page": "#14181e",
    "ink": "#e8ecf1",
    "muted": "#98a3b3",
    "line": "#323a45",
    "idle": "#1c222a",
    "hatch": "#2a323d",
    "memory": "#3d4858",
    "memory-line": "#8b99ae",
}

_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 92, 22, 20  # margins
_BAR, _MEMORY, _SPACE = 30, 16, 10  # heights: of bars, of memory, between stages
_HEAD, _GAP, _AXIS, _LEGEND = 40, 26, 26, 34
_NARROW = 15  # the width of a bar that holds two digits
_DIGIT = 0.62  # the width of a digit, of its size


class Rectangle(NamedTuple):
    """A filled rectangle, with the bar that it stands for, if any."""

    x: float
    y: float
    width: float
    height: float
    fill: str  # a colour, or a name of the theme; "idle" is hatched
    bar: TimedTask | None = None
    stage: int = 0
    chart: int = 0


class Label(NamedTuple):
    """A line of text; `y` is its baseline."""

    x: float
    y: float
    text: str
    size: float
    fill: str
    anchor: str = "start"  # or "middle", "end"
    bold: bool = False


class Area(NamedTuple):
    """The filled area between the points of a line and `base`; the line alone, if `base` is None."""

    points: list[tuple[float, float]]
    base: float | None
    fill: str
    line: str


@dataclass
class Scene:
    """Shapes, the front ones last, and the description of a bar under the pointer."""

    width: float
    height: float = 0.0
    shapes: list[Rectangle | Label | Area] = field(default_factory=list)
    title: str = ""
    unit: str = ""

    def describe(self, stage: int, bar: TimedTask) -> str:
        """`F3.1 · forward of microbatch 3, chunk 1 · stage 2 · 12 to 13 (1)`."""
        task, unit = bar.task, f" {self.unit}" if self.unit else ""
        chunk = f", chunk {task.chunk}" if task.chunk else ""
        return (
            f"{task} · {WORDS[task.kind]} of microbatch {task.microbatch}{chunk} · stage {stage} · "
            f"{number(bar.start)} to {number(bar.end)} ({number(bar.end - bar.start)}{unit})"
        )


def draw(charts: Sequence[Chart], width: float | None = None) -> Scene:
    """Lays out charts with a common axis of time; all have the unit of the first.

    Args:
        width: None: by the length of the median task, from 1200 to 3600.
    """
    longest = max(chart.step_time for chart in charts) or 1.0
    if width is None:
        durations = [bar.end - bar.start for chart in charts for bars in chart.stages for bar in bars]
        width = max(1200.0, min(3600.0, _LEFT + _RIGHT + _NARROW * longest / (median(durations) or 1.0)))
    scene = Scene(round(width), title=" and ".join(chart.name for chart in charts), unit=charts[0].unit)
    width = scene.width
    highest = max(chart.peak(stage) for chart in charts for stage in range(len(chart.stages))) or 1.0
    per_time = (width - _LEFT - _RIGHT) / longest
    y = float(_TOP)
    for index, chart in enumerate(charts):
        y = _draw_chart(scene, chart, index, y, per_time, highest, charts[0]) + _GAP
    y = _draw_axis(scene, y - _GAP, longest, per_time)
    y = _draw_legend(scene, y + _LEGEND, charts)
    scene.height = y + _BOTTOM
    return scene


def _draw_chart(
    scene: Scene, chart: Chart, index: int, y: float, per_time: float, highest: float, first: Chart
) -> float:
    """Draws a chart whose top is at `y`; returns its bottom."""
    add = scene.shapes.append
    right = scene.width - _RIGHT + 80
    add(Label(16, y + 14, chart.name, 17, "ink", bold=True))
    add(Label(16 + _text_width(chart.name, 17) + 14, y + 14, chart.shape(), 13, "muted"))
    add(Label(right, y + 14, _headline(chart, first), 13, "ink", "end", bold=True))
    row = y + _HEAD
    end = chart.step_time * per_time
    for stage, bars in enumerate(chart.stages):
        add(Label(_LEFT - 10, row + _BAR / 2 + 4, f"stage {stage}", 12, "ink", "end"))
        add(Rectangle(_LEFT, row, end, _BAR, "idle"))
        for bar in bars:
            _draw_bar(scene, chart, index, stage, bar, row, per_time)
        row += _BAR
        if chart.keeps_activations:
            _draw_memory(scene, chart, stage, row + 2, per_time, highest)
            row += _MEMORY
        row += _SPACE
    return row - _SPACE


def _headline(chart: Chart, first: Chart) -> str:
    text = chart.summary()
    if chart is not first and first.step_time:
        change = chart.step_time / first.step_time - 1
        text += f" ({abs(change):.1%} {'less' if change < 0 else 'more'} time)"
    return text


def _draw_bar(scene: Scene, chart: Chart, index: int, stage: int, bar: TimedTask, row: float, per_time: float) -> None:
    x, width = _LEFT + bar.start * per_time, (bar.end - bar.start) * per_time
    gap = min(1.0, width / 8)  # between neighbours
    fill = colour(bar.task, chart.num_chunks)
    scene.shapes.append(Rectangle(x + gap / 2, row, width - gap, _BAR, fill, bar, stage, index))
    text = str(bar.task.microbatch)
    size = min(13.0, (width - 3) / (_DIGIT * len(text)))
    if size >= 7:
        scene.shapes.append(Label(x + width / 2, row + _BAR / 2 + size * 0.36, text, size, text_colour(fill), "middle"))


def _draw_memory(scene: Scene, chart: Chart, stage: int, top: float, per_time: float, highest: float) -> None:
    base = top + _MEMORY
    points = []
    level = base
    levels = dict(chart.memory(stage))  # after all changes of a moment
    for time, microbatches in [*levels.items(), (chart.step_time, 0.0)]:
        x = _LEFT + time * per_time
        points.append((x, level))
        level = base - _MEMORY * microbatches / highest
        points.append((x, level))
    scene.shapes.append(Area(points, base, "memory", "memory-line"))
    peak = chart.peak(stage)
    scene.shapes.append(Label(_LEFT + chart.step_time * per_time + 8, base - 3, f"peak {number(peak)}", 11, "muted"))


def _draw_axis(scene: Scene, y: float, longest: float, per_time: float) -> float:
    line = y + 10
    scene.shapes.append(Area([(_LEFT, line), (_LEFT + longest * per_time, line)], None, "line", "line"))
    step = _tick(longest / 10)
    for tick in range(int(longest / step * 1.0001) + 1):
        x = _LEFT + tick * step * per_time
        scene.shapes.append(Area([(x, line), (x, line + 4)], None, "line", "line"))
        unit = f" {scene.unit}" if scene.unit and not tick else ""
        scene.shapes.append(Label(x, line + 17, f"{number(tick * step)}{unit}", 11, "muted", "middle"))
    return y + _AXIS


def _tick(least: float) -> float:
    """The smallest of 1, 2 and 5, times a power of ten, that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.9999)


def _draw_legend(scene: Scene, y: float, charts: Sequence[Chart]) -> float:
    used = {(bar.task, chart.num_chunks) for chart in charts for bars in chart.stages for bar in bars}
    entries: list[tuple[list[str], str]] = []  # colours, and what they stand for
    for kind, word in WORDS.items():
        fills = {colour(task, num_chunks): task.chunk for task, num_chunks in used if task.kind is kind}
        if fills:
            entries.append((sorted(fills, key=fills.__getitem__), word))
    entries.append((["idle"], "idle"))
    if any(chart.keeps_activations for chart in charts):
        entries.append((["memory"], "activations kept, in microbatches"))
    if any(chart.num_chunks > 1 for chart in charts):
        entries.append(([], "lighter: a later chunk"))
    x = float(_LEFT)
    for colours, word in entries:
        width = 17 * len(colours) + 5 + _text_width(word, 12)
        if x + width > scene.width and x > _LEFT:
            x, y = float(_LEFT), y + 22
        for index, fill in enumerate(colours):
            scene.shapes.append(Rectangle(x + 17 * index, y - 11, 16, 14, fill))
        scene.shapes.append(Label(x + width - _text_width(word, 12), y + 1, word, 12, "muted"))
        x += width + 12
    return y


def colour(task: Task, num_chunks: int) -> str:
    """Colour of a computation: the colour of its kind, mixed with white for later chunks."""
    share = 0.55 * task.chunk / max(1, num_chunks - 1)
    channels = [int(COLOURS[task.kind][begin : begin + 2], 16) for begin in (1, 3, 5)]
    return "#" + "".join(f"{round(channel + (255 - channel) * share):02x}" for channel in channels)


def text_colour(fill: str) -> str:
    """Black or white, whichever has more contrast with a colour (WCAG's relative luminance)."""
    channels = [int(fill[begin : begin + 2], 16) / 255 for begin in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def _text_width(text: str, size: float) -> float:
    """Approximate width of a text, for fonts without serifs."""
    return size * sum(0.36 if char in "fijlrt.,:;'|-() " else 0.66 for char in text)

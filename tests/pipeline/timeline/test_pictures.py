"""Pictures as they were reviewed, to the digit: a change of a number or a word of one is a change of a file here.

NXD_UPDATE_PICTURES=1 writes the files anew: open them in a browser before they are committed. What is true of every
picture, test_timeline.py says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuronx_dist.pipeline.schedule import Costs, Inference, training_schedule
from neuronx_dist.pipeline.timeline.chart import LEGEND, Chart, number, simulated, text
from neuronx_dist.pipeline.timeline.command import arguments
from neuronx_dist.pipeline.timeline.png import save_png
from neuronx_dist.pipeline.timeline.scene import COLOURS, DARK, LIGHT, Area, Label, Rectangle, Scene, draw, text_colour
from neuronx_dist.pipeline.timeline.svg import html, svg

FOLDER = Path(__file__).parent / "pictures"
ONES = Costs()


def _chart(name: str, stages: int, microbatches: int, costs: Costs = ONES, chunks: int = 1, unit: str = "") -> Chart:
    schedule = training_schedule(stages, microbatches, schedule=name, num_chunks=chunks)
    return simulated(name, schedule, costs, unit)


def _two_charts() -> str:
    """Halves of backwards, whole ones, two chunks, a headline that compares, narrow bars without a number."""
    return svg(draw([_chart("zb_v", 2, 3), _chart("1f1b", 2, 2, Costs(0.3, 2, 3, message=0.05))], 900))


def _page() -> str:
    """A unit of time, three chunks, a title that HTML must escape, a legend of two lines."""
    chart = _chart("interleaved", 2, 2, Costs(33, 20, 15, message=1.25), chunks=3, unit="ms")
    return html(draw([Chart("a<b>.json, step 3", chart.stages, "ms")], 480))


def _without_memory() -> str:
    charts = [simulated("inference", Inference(2, 11), Costs()), simulated("shorter", Inference(2, 6), Costs())]
    return svg(draw(charts))


def _in_a_terminal() -> str:
    charts = [
        (_chart("zb_v", 2, 3), 120),
        (_chart("gpipe", 3, 11, Costs(1, 0.5, 0.25)), 50),
        (_chart("interleaved", 2, 2, Costs(100.4, 0, 0), 2, "ms"), 80),
        (_chart("1f1b", 1, 1, Costs(0, 0, 0)), 10),
    ]
    return "\n\n".join([*(text(chart, width) for chart, width in charts), LEGEND, ""])


@pytest.mark.parametrize(
    "file,picture",
    [
        ("two_charts.svg", _two_charts),
        ("page.html", _page),
        ("without_memory.svg", _without_memory),
        ("in_a_terminal.txt", _in_a_terminal),
    ],
)
def test_pictures_are_as_reviewed(file: str, picture: Callable[[], str]) -> None:
    now = picture()
    if os.environ.get("NXD_UPDATE_PICTURES"):
        (FOLDER / file).write_text(now, encoding="utf-8")
    assert now == (FOLDER / file).read_text(encoding="utf-8")


def test_a_text_has_the_colour_of_more_contrast() -> None:
    """WCAG: (lighter + 0.05) / (darker + 0.05)."""

    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    greys = [f"#{level:02x}{level:02x}{level:02x}" for level in range(0, 256, 5)]
    primaries = [f"#{r:02x}{g:02x}{b:02x}" for r in (0, 130, 255) for g in (0, 130, 255) for b in (0, 130, 255)]
    for fill in (*greys, *primaries, *COLOURS.values()):
        on_black, on_white = (luminance(fill) + 0.05) / 0.05, 1.05 / (luminance(fill) + 0.05)
        assert text_colour(fill) == ("#000000" if on_black > on_white else "#ffffff"), fill


def test_numbers_are_short() -> None:
    values = (0, 1, 2.5, 1 / 3, 12.345, 99.96, 100, 1234.5, -0.5, -250.4)
    assert [number(value) for value in values] == "0 1 2.5 0.333 12.3 100 100 1234 -0.5 -250".split()


def test_the_width_follows_the_shortest_usual_task() -> None:
    """15 units for the median task, from 1200 to 3600 in all."""
    costs = Costs(1, 0.25, 0.25)
    for microbatches, width in ((4, 1200), (60, 78 + 92 + 20 * 93), (120, 3600)):  # a step of 93; the median is 0.75
        assert draw([_chart("1f1b", 3, microbatches, costs), _chart("1f1b", 3, 2, costs)]).width == width


def test_the_themes_colours_differ() -> None:
    """Marks on top of other marks have a visible colour."""
    for theme in (LIGHT, DARK):
        assert len({*theme.values()}) == len(theme)
    assert LIGHT.keys() == DARK.keys()


# --- the command's arguments


def test_every_argument_arrives() -> None:
    default = dict.fromkeys(
        "step stages microbatches chunks forward backward_input backward_weight message width".split()
    )
    assert vars(arguments().parse_args([])) == {**default, "schedule": [], "trace": [], "out": []}
    words = (
        "--schedule a --schedule b --trace c d --trace e --step 5 --stages 2 --microbatches 3 --chunks 4 "
        "--forward 0 --backward-input 0.5 --backward-weight 1.5 --message 2.5 --out f --out g --width 400"
    )
    expected = dict(step=5, stages=2, microbatches=3, chunks=4, forward=0.0, backward_input=0.5, backward_weight=1.5)
    expected |= dict(message=2.5, width=400)
    lists = dict(schedule=["a", "b"], trace=[["c", "d"], ["e"]], out=["f", "g"])
    assert vars(arguments().parse_args(words.split())) == {**expected, **lists}
    assert arguments().parse_args(["--width", "20000"]).width == 20_000


# --- PNG: pixels of a scene that is made by hand


def _pixels(shapes: list[Any], folder: Path) -> Any:
    image = pytest.importorskip("PIL.Image")
    save_png(Scene(100, 50, shapes), folder / "t.png")
    with image.open(folder / "t.png") as picture:
        assert picture.size == (200, 100)
        return picture.convert("RGB")


def _is(pixel: tuple[int, int, int], colour: str) -> bool:
    return all(abs(channel - int(colour[at : at + 2], 16)) < 12 for channel, at in zip(pixel, (1, 3, 5)))


def test_shapes_are_where_the_scene_has_them(tmp_path: Path) -> None:
    bars = [Rectangle(10, 5, 30, 10, "#d55e00"), Rectangle(60, 5, 30, 40, "idle"), Rectangle(20, 20, 2, 20, "#0072b2")]
    area = Area([(30, 30), (40, 30), (40, 25), (55, 25)], 40, "memory", "memory-line")
    line = Area([(10, 45), (50, 45)], None, "line", "memory-line")
    picture = _pixels([*bars, area, line], tmp_path)
    for x, y, colour in (
        (5, 10, LIGHT["page"]), (11, 10, "#d55e00"), (39, 6, "#d55e00"), (41, 10, LIGHT["page"]),
        (25, 16, LIGHT["page"]), (25, 14, "#d55e00"), (10, 5, LIGHT["page"]),  # a corner is round
        (21, 30, "#0072b2"), (19, 30, LIGHT["page"]), (21, 41, LIGHT["page"]),
        (35, 35, LIGHT["memory"]), (45, 27, LIGHT["memory"]), (35, 27, LIGHT["page"]), (50, 42, LIGHT["page"]),
        (35, 30, LIGHT["memory-line"]), (50, 25, LIGHT["memory-line"]), (30, 45, LIGHT["memory-line"]),
    ):  # fmt: skip
        assert _is(picture.getpixel((2 * x, 2 * y)), colour), (x, y)
    hatched = [picture.getpixel((x, y)) for x in range(124, 176) for y in range(14, 86)]
    idle, lines = (sum(_is(pixel, LIGHT[name]) for pixel in hatched) for name in ("idle", "hatch"))
    assert idle > len(hatched) / 3 and len(hatched) / 50 < lines < len(hatched) / 2


def _ink(picture: Any, colour: str) -> tuple[int, int, int, int, int]:
    """Box of the pixels nearer to `colour` than to the page: left, right, top, bottom, and their number."""
    dark = [(x, y) for x in range(200) for y in range(100) if sum(picture.getpixel((x, y))) < 3 * 140]
    assert any(_is(picture.getpixel(pixel), colour) for pixel in dark)
    xs, ys = zip(*dark)
    return min(xs), max(xs), min(ys), max(ys), len(dark)


def test_texts_are_where_the_scene_has_them(tmp_path: Path) -> None:
    inks = {
        (anchor, bold): _ink(_pixels([Label(50, 30, "HHH", 12, "ink", anchor, bold)], tmp_path), LIGHT["ink"])
        for anchor, bold in (("start", False), ("middle", False), ("end", False), ("start", True))
    }
    left, right, top, bottom, count = inks["start", False]
    assert 100 <= left < 106 and abs(bottom - 60) <= 2 and 15 <= bottom - top <= 21  # capitals: 0.73 of 24 pixels
    middle, end = inks["middle", False], inks["end", False]
    assert abs(middle[0] + middle[1] - 200) <= 4 and 194 < end[1] + 100 <= 300 and 94 <= end[1] <= 100
    assert inks["start", True][4] > 1.2 * count
    coloured = _ink(_pixels([Label(50, 30, "HHH", 12, "#0072b2")], tmp_path), "#0072b2")
    assert abs(coloured[0] - left) <= 2 and abs(coloured[1] - right) <= 2

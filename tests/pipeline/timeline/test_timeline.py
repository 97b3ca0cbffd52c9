"""`neuronx-dist timeline`: every task is drawn, where it belongs, in every format; what the numbers say is true."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from neuronx_dist.__main__ import main
from neuronx_dist.pipeline.schedule import (
    Costs,
    Inference,
    Kind,
    Schedule,
    Task,
    TimedTask,
    simulate,
    training_schedule,
)
from neuronx_dist.pipeline.timeline.chart import Chart, simulated, text
from neuronx_dist.pipeline.timeline.png import save_png
from neuronx_dist.pipeline.timeline.recorded import measured_costs, recorded
from neuronx_dist.pipeline.timeline.scene import Area, Label, Rectangle, draw
from neuronx_dist.pipeline.timeline.svg import html, svg

NAMES = ("1f1b", "interleaved", "gpipe", "zb_h1", "zb_v")


def schedule_of(name: str, stages: int = 3, microbatches: int = 5) -> Schedule:
    chunks = 2 if name == "interleaved" else 1
    return training_schedule(stages, microbatches, schedule=name, num_chunks=chunks)


def chart_of(name: str, costs: Costs | None = None) -> Chart:
    return simulated(name, schedule_of(name), costs or Costs())


class Page(HTMLParser):
    """The elements of a page, with their attributes, and its text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


# --- what is drawn


@pytest.mark.parametrize("name", NAMES)
def test_a_chart_says_what_the_simulation_says(name: str) -> None:
    """With several chunks each has its share of a stage's costs and memory."""
    schedule = schedule_of(name)
    chunks = schedule.num_chunks
    chart = simulated(name, schedule, Costs(forward=2, backward_input=3, backward_weight=1, message=0.5))
    simulation = simulate(schedule, Costs(2 / chunks, 3 / chunks, 1 / chunks, 0.5))
    assert chart.step_time == pytest.approx(simulation.step_time) and chart.bubble == pytest.approx(simulation.bubble)
    assert [chart.peak(stage) * chunks for stage in range(3)] == pytest.approx(simulation.peak_in_flight)
    assert chart.shape() == f"3 stages{' × 2 chunks' if chunks == 2 else ''}, 5 microbatches"
    assert f"bubble {simulation.bubble:.1%}, step" in chart.summary()


@pytest.mark.parametrize("name", NAMES)
def test_every_task_has_a_box_where_its_times_are(name: str) -> None:
    """And boxes of a stage do not overlap."""
    chart = chart_of(name)
    scene = draw([chart])
    boxes = [shape for shape in scene.shapes if isinstance(shape, Rectangle) and shape.bar is not None]
    rows = {}
    for stage in range(3):
        row = [box for box in boxes if box.stage == stage]
        assert [box.bar for box in row] == list(chart.stages[stage])
        assert all(one.x + one.width <= other.x + 1e-6 for one, other in zip(row, row[1:]))
        (rows[stage],) = {box.y for box in row}
    assert rows[0] < rows[1] < rows[2]
    idle = next(shape for shape in scene.shapes if isinstance(shape, Rectangle) and shape.fill == "idle")
    for box in boxes:
        assert (box.x + box.width / 2 - idle.x) / idle.width == pytest.approx(
            (box.bar.start + box.bar.end) / 2 / chart.step_time
        )
        assert box.width == pytest.approx(idle.width * (box.bar.end - box.bar.start) / chart.step_time, abs=1.01)


def test_kinds_and_chunks_have_colours_of_their_own() -> None:
    scene = draw([chart_of("1f1b"), chart_of("zb_v")])
    fills = {
        (shape.bar.task.kind, shape.bar.task.chunk): shape.fill
        for shape in scene.shapes
        if isinstance(shape, Rectangle) and shape.bar is not None
    }
    assert len(fills) == 7 == len(set(fills.values()))
    words = " ".join(shape.text for shape in scene.shapes if isinstance(shape, Label))
    assert "backward, weights" in words and "lighter: a later chunk" in words and "less time)" in words


def test_two_schedules_have_one_axis_of_time_and_one_scale_of_memory() -> None:
    fast, slow = chart_of("zb_v"), chart_of("gpipe", Costs(3, 3, 3))
    scene = draw([fast, slow])
    boxes = [shape for shape in scene.shapes if isinstance(shape, Rectangle) and shape.bar is not None]
    widths = {
        box.chart: box.width for box in boxes if box.bar == box.bar and box.bar.task == Task(box.bar.task.kind, 0, 0)
    }
    assert widths[1] > 2 * widths[0] and {box.chart for box in boxes} == {0, 1}
    heights = [
        area.base - min(y for _, y in area.points)
        for area in scene.shapes
        if isinstance(area, Area) and area.base is not None
    ]
    bases = [area.base - 16 for area in scene.shapes if isinstance(area, Area) and area.base is not None]
    tops = [min(y for _, y in area.points) for area in scene.shapes if isinstance(area, Area) and area.base is not None]
    assert min(top - base for top, base in zip(tops, bases)) == pytest.approx(0)  # the highest takes all of its row
    peaks = [chart.peak(stage) for chart in (fast, slow) for stage in range(3)]
    assert [height / max(heights) for height in heights] == pytest.approx([peak / max(peaks) for peak in peaks])


def test_memory_is_drawn_in_steps_from_forward_to_backward() -> None:
    chart = chart_of("1f1b")
    assert [tuple(change) for change in chart.memory(2)][:3] == [(0, 0), (2, 1), (5, 0)]
    areas = [shape for shape in draw([chart]).shapes if isinstance(shape, Area) and shape.base is not None]
    for stage, area in enumerate(areas):
        left, right = area.points[0][0], area.points[-1][0]
        times = sorted({time for time, _ in chart.memory(stage)} | {chart.step_time})
        assert sorted({x for x, _ in area.points}) == pytest.approx(
            [left + (right - left) * time / chart.step_time for time in times]
        )
    assert not simulated("", Inference(2, 2), Costs()).keeps_activations
    scene = draw([simulated("", Inference(2, 2), Costs())])
    assert not any(isinstance(shape, Area) and shape.base is not None for shape in scene.shapes)


def test_tasks_that_take_no_time_are_drawn_too() -> None:
    for costs in (Costs(forward=0), Costs(0, 0, 0)):
        chart = chart_of("zb_v", costs)
        assert html(draw([chart])).count("data-tip=") == sum(map(len, chart.stages)) and text(chart)


@pytest.mark.slow
def test_many_tasks_make_a_wider_picture() -> None:
    assert draw([chart_of("1f1b")]).width == 1200 and draw([chart_of("1f1b")], 700).width == 700
    legend = [shape for shape in draw([chart_of("zb_v")], 500).shapes if isinstance(shape, Label)][-5:]
    assert len({label.y for label in legend}) > 1 and all(label.x < 500 for label in legend)  # in several lines
    many = simulated("", training_schedule(4, 64, schedule="zb_v"), Costs())
    assert 2000 < draw([many]).width <= 3600


# --- formats


@pytest.mark.parametrize("name", NAMES)
def test_a_page_stands_alone_and_has_every_task(name: str) -> None:
    chart = chart_of(name)
    source = html(draw([chart]))
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", source)
    page = Page(source)
    assert {tag for tag, _ in page.elements}.isdisjoint({"link", "img", "iframe"})
    assert not any("src" in attrs or "href" in attrs for _, attrs in page.elements)
    tips = [attrs["data-tip"] or "" for _, attrs in page.elements if "data-tip" in attrs]
    expected = [f"{bar.task} · " for bars in chart.stages for bar in bars]
    assert [tip[: len(begin)] for tip, begin in zip(tips, expected)] == expected and len(tips) == len(expected)
    assert "prefers-color-scheme: dark" in source and any("bubble" in word for word in page.words)


def test_a_tip_says_all_of_a_task() -> None:
    scene = draw([chart_of("zb_v")])
    bar = next(bar for bar in chart_of("zb_v").stages[1] if bar.task.chunk == 1)
    assert scene.describe(1, bar) == (
        f"{bar.task} · forward of microbatch 0, chunk 1 · stage 1 · {bar.start:g} to {bar.end:g} (0.5)"
    )


def test_svg_is_xml_with_titles() -> None:
    from xml.etree import ElementTree

    chart = chart_of("zb_h1")
    root = ElementTree.fromstring(svg(draw([chart])))
    titles = [element.text for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert (
        len(titles) == sum(map(len, chart.stages))
        and titles[0] == "F0 · forward of microbatch 0 · stage 0 · 0 to 1 (1)"
    )


@pytest.mark.slow
def test_png_has_twice_the_size_of_the_scene(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    scene = draw([chart_of("zb_v")], 600)
    save_png(scene, tmp_path / "t.png")
    with image.open(tmp_path / "t.png") as picture:
        assert abs(picture.width - 1200) <= 1 and abs(picture.height - 2 * scene.height) <= 1
        box = next(s for s in scene.shapes if isinstance(s, Rectangle) and s.bar is not None)
        colour = picture.convert("RGB").getpixel((int(2 * box.x + 4), int(2 * box.y + 8)))
    assert all(abs(channel - int(box.fill[i : i + 2], 16)) < 12 for channel, i in zip(colour, (1, 3, 5)))


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["timeline", "--schedule", "1f1b", "--out", str(tmp_path / "t.png")]) == 2
    assert "pip install matplotlib, or write .html or .svg" in capsys.readouterr().err


def test_text() -> None:
    lines = text(simulated("1f1b", training_schedule(2, 3), Costs())).splitlines()
    assert lines == [
        "1f1b: 2 stages, 3 microbatches: bubble 25.0%, step 12, peak memory 2 microbatches",
        "stage 0 F0F1....B0--F2B1--..B2--  peak 2",
        "stage 1 ..F0B0--F1B1--F2B2--....  peak 1",
    ]
    narrow = text(simulated("zb_v", training_schedule(4, 16, schedule="zb_v"), Costs()), width=60).splitlines()
    assert all(len(line.split("  peak")[0]) <= 60 for line in narrow[1:])
    assert {"F", "f", "W", "w"} <= set("".join(narrow[1:]))


# --- traces


def trace(path: Path, steps: dict[int, dict[int, str]]) -> str:
    """A trace with tasks of 2 ms each: by step and rank, tasks such as `F0 B0`. Ranks 2 and 3 do what 0 and 1 do."""
    events: list[dict[str, Any]] = [{"name": "trace", "ph": "M", "pid": 0, "args": {}}]
    categories = {"F": "forward", "B": "backward"}
    for step, ranks in steps.items():
        for rank, tasks in ranks.items():
            args = {"step": step, "stage": rank // 2}
            for number, task in enumerate(tasks.split()):
                times = {"ts": 1e6 * step + 3000 * number + 500 * rank, "dur": 2000.0}
                more = {"chunk": 0, "microbatch": int(task[1:])}
                events.append({"ph": "X", "pid": rank, "cat": categories[task[0]], "args": {**args, **more}, **times})
            events.append({"ph": "X", "pid": rank, "cat": "step", "args": {**args, "stages": 2}, "ts": 0, "dur": 1})
    path.write_text(json.dumps(events))
    return str(path)


BOTH = {0: "F0 B0", 1: "F0 B0", 2: "F0 B0", 3: "F0 B0"}


def test_a_recorded_step(tmp_path: Path) -> None:
    path = trace(tmp_path / "t.json", {0: BOTH, 1: BOTH, 2: {**BOTH, 2: "", 3: ""}, 3: dict.fromkeys(range(4), "F0")})
    chart = recorded([path])
    assert chart.name == "t.json, step 1" and chart.unit == "ms"  # 2 is not complete, 3 has no backward
    assert [[str(bar.task) for bar in bars] for bars in chart.stages] == [["F0", "B0"]] * 2
    assert [bar.start for bar in chart.stages[0]] == [0, 3] and [bar.start for bar in chart.stages[1]] == [1, 4]
    assert chart.step_time == 6 and chart.bubble == pytest.approx(1 - 4 / 6)
    assert recorded([path], 3).step_time == 3 and len(recorded([path], 2).stages[1]) == 0
    costs = measured_costs(chart)
    assert (costs.forward, costs.backward_input, costs.backward_weight) == (2, 1, 1)


def test_a_recorded_step_with_chunks_and_halves(tmp_path: Path) -> None:
    """Two pipelines, whose events stand in any order; tasks of two chunks, and halves of backwards."""

    def event(rank: int, stage: int, cat: str, chunk: int, start: float, duration: float, step: int = 7) -> Any:
        args = {"step": step, "stage": stage, "chunk": chunk, "microbatch": 0}
        return {"ph": "X", "pid": rank, "cat": cat, "args": args, "ts": start, "dur": duration}

    tasks = [("forward", 1, 6e3, 1e3), ("forward", 0, 5e3, 1e3), ("backward_weight", 0, 9e3, 4e3)]
    tasks += [("backward_input", 0, 7e3, 2e3), ("backward_input", 1, 13e3, 500.0)]
    lowest = [event(rank, stage, *task) for rank, stage in ((5, 1), (4, 0)) for task in tasks]
    others = [event(rank, stage, *task) for rank, stage in ((7, 1), (6, 0)) for task in [("forward", 0, 4e3, 9e3)]]
    ends = [
        {"cat": "step", "pid": 4, "args": {"step": 7, "stages": 2}},
        {"cat": "send", "args": {"step": 8}},
        {"ph": "M"},
    ]
    for number, events in enumerate(([*others, *lowest, *ends], [*ends, *lowest, *others])):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(events))
        chart = recorded([str(path)])
        assert chart.name == f"{number}.json, step 7"
        for bars in chart.stages:  # the other pipeline was earlier by 1 ms
            expected = [("F0", 1, 2), ("F0.1", 2, 3), ("I0", 3, 5), ("W0", 5, 9), ("I0.1", 9, 9.5)]
            assert [(str(bar.task), bar.start, bar.end) for bar in bars] == expected
    assert measured_costs(chart) == Costs(forward=2, backward_input=2.5, backward_weight=8)
    with pytest.raises(ValueError, match="there is no step 6; the trace has step 7$"):
        recorded([str(path)], 6)


def test_what_tasks_took_is_their_median() -> None:
    def bars(kind: Kind, *durations: float) -> list[TimedTask]:
        return [
            TimedTask(Task(kind, 0, number), 10.0 * number, 10.0 * number + d) for number, d in enumerate(durations)
        ]

    stages = [bars(Kind.FORWARD, 1, 2, 9), bars(Kind.BACKWARD, 3, 4, 9), bars(Kind.FORWARD, 2)]
    assert measured_costs(Chart("", stages)) == Costs(forward=2, backward_input=2, backward_weight=2)
    assert measured_costs(Chart("", [bars(Kind.BACKWARD_INPUT, 3)])) == Costs(0, 3, 0)
    assert measured_costs(Chart("", [bars(Kind.FORWARD, 3)])) == Costs(3, 0, 0)


def test_a_trace_of_several_hosts(tmp_path: Path) -> None:
    north = trace(tmp_path / "north.json", {0: {0: "F0 B0"}})
    south = trace(tmp_path / "south.json", {0: {2: "F0 B0"}})
    assert [len(bars) for bars in recorded([north, south]).stages] == [2, 2]


def test_files_of_two_runs_are_no_trace(tmp_path: Path) -> None:
    one, other = (trace(tmp_path / name, {0: BOTH, 1: BOTH}) for name in ("a.json", "b.json"))
    for paths in ([one, other], [one, one]):
        with pytest.raises(
            ValueError, match="rank 0 does the forward of microbatch 0 twice in step 0: .* --trace a.json"
        ):
            recorded(paths)


@pytest.mark.parametrize(
    "content,step,message",
    [
        (None, None, "No such file"),
        ("[{}", None, "is not valid JSON"),
        ('{"a": 1}', None, "is not a list of events"),
        ('[{"name": "trace"}]', None, "this trace has no pipeline step"),
        ("step", 4, "there is no step 4; the trace has steps 0 to 1"),
    ],
)
def test_traces_that_cannot_be_drawn(content: str | None, step: int | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    if content == "step":
        trace(path, {0: BOTH, 1: BOTH})
    elif content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        recorded([str(path)], step)


# --- the command


def test_command_writes_files(tmp_path: Path, capsys: Any) -> None:
    page, picture = tmp_path / "t.html", tmp_path / "t.svg"
    words = ["timeline", "--schedule", "zb_v", "--schedule", "1f1b", "--stages", "4", "--microbatches", "6"]
    assert main([*words, "--out", str(page), "--out", str(picture)]) == 0
    assert page.read_text().count("data-tip=") == 4 * 6 * (3 * 2 + 2) == picture.read_text().count("<title>")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["zb_v", "1f1b", f"wrote {page}, {picture}"]
    assert "bubble" in lines[0]


def test_command_in_the_terminal(capsys: Any) -> None:
    assert main(["timeline", "--schedule", "inference", "--stages", "2", "--microbatches", "2", "--chunks", "2"]) == 0
    assert "2 stages × 2 chunks, 2 microbatches" in (out := capsys.readouterr().out)
    assert out.splitlines()[-1].startswith("F forward, B backward") and "lower case: a later chunk" in out
    assert main(["timeline", "--schedule", "1f1b", "--stages", "1", "--microbatches", "1"]) == 0
    assert "1 stage, 1 microbatch: bubble 0.0%, step 3, peak memory 1 microbatch\n" in capsys.readouterr().out
    assert main(["timeline", "--schedule", "1f1b", "--forward", "2", "--backward-input", "4", "--message", "1"]) == 0
    expected = simulate(training_schedule(4, 8), Costs(2, 4, 1, 1))
    assert f"bubble {expected.bubble:.1%}, step {expected.step_time:.3g}" in capsys.readouterr().out


def test_command_compares_a_trace_with_what_could_be(tmp_path: Path, capsys: Any) -> None:
    """The simulation has the trace's stages and microbatches, and what its tasks took."""
    path = trace(tmp_path / "t.json", {0: {0: "F0 F1 B0 B1", 2: "F0 F1 B0 B1"}})
    assert main(["timeline", "--trace", path, "--schedule", "gpipe", "--out", str(tmp_path / "t.html")]) == 0
    recorded_line, simulated_line, _ = capsys.readouterr().out.splitlines()
    assert "step 12 ms" in recorded_line and "gpipe: 2 stages, 2 microbatches" in simulated_line
    assert "step 12 ms" in simulated_line  # three rounds of 2 + 2


def test_command_takes_a_schedule_of_the_user(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from neuronx_dist.pipeline import OneFOneB\ndef make(stages, microbatches):\n"
                    "    return OneFOneB(stages, microbatches)\n")  # fmt: skip
    assert main(["timeline", "--schedule", f"{file}:make"]) == 0
    assert f"{file}:make: 4 stages" in capsys.readouterr().out
    file.write_text(file.read_text() + "own = make(3, 5)\ndef wrong(stages, microbatches): return 1\n")
    assert main(["timeline", "--schedule", f"{file}:own"]) == 0  # with its own sizes
    assert f"{file}:own: 3 stages, 5 microbatches" in capsys.readouterr().out
    for sizes in (["--stages", "4"], ["--microbatches", "8"]):
        assert main(["timeline", "--schedule", f"{file}:own", *sizes]) == 2
        assert "num_microbatches=5) does not fit" in capsys.readouterr().err
    path = trace(tmp_path / "t.json", {0: BOTH})
    assert main(["timeline", "--trace", path, "--schedule", f"{file}:own"]) == 2
    assert "does not fit 2 stages and 1 microbatch:" in capsys.readouterr().err
    assert main(["timeline", "--schedule", f"{file}:wrong"]) == 2
    assert "must return a Schedule, got 1" in capsys.readouterr().err
    assert main(["timeline", "--schedule", f"{file}:mke"]) == 2
    assert "there is no 'mke', but 'make'" in capsys.readouterr().err
    for source, message in (
        ("\ndef make(a, b):\n    return 1 / 0\n", "3: ZeroDivisionError"),
        ("\n1 +", "2: SyntaxError"),
        ("import nowhere", "1: ModuleNotFoundError: No module named 'nowhere'"),
    ):
        file.write_text(source)
        assert main(["timeline", "--schedule", f"{file}:make"]) == 2
        assert f"--schedule {file}:make: {file}:{message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words,message",
    [
        (["--schedule", "zbv"], "--schedule zbv: there is no 'zbv', but 'zb_v' (available: 1f1b, "),
        (["--schedule", "zb_v", "--chunks", "3"], "has 2 chunks on each stage, not 3 (--chunks): "),
        (["--schedule", "1f1b", "--stages", "0"], "--stages: expected an integer of at least 1, got 0"),
        (["--schedule", "1f1b", "--chunks", "0"], "--chunks: expected an integer of at least 1, got 0"),
        (["--schedule", "1f1b", "--forward", "-1"], "--forward: a time is a number from 0 on, got -1"),
        (["--schedule", "1f1b", "--message", "inf"], "--message: a time is a number from 0 on, got inf"),
        (["--schedule", "1f1b", "--width", "399"], "width of 400 to 20000 pixels, got 399"),
        (["--schedule", "1f1b", "--width", "20001"], "width of 400 to 20000 pixels, got 20001"),
        (["--schedule", "1f1b", "--step", "1"], "--step 1 is a step of a trace: give --trace too"),
        (["--trace", "t.json", "--stages", "2"], "--stages goes with --schedule: a trace records it"),
        (["--trace", "t.json", "--microbatches", "2"], "--microbatches goes with --schedule: a trace records it"),
        (["--schedule", "1f1b", "--out", "t.gif"], "--out t.gif: the name must end in .html, .svg or .png"),
        (["--schedule", "1f1b", "--out", "nowhere/t.svg"], "--out nowhere/t.svg: there is no folder 'nowhere'"),
        (["--trace", "nowhere.json"], "nowhere.json: No such file"),
        (["--schedule", "nowhere.py:make"], "--schedule nowhere.py:make: there is no file 'nowhere.py'"),
        ([], "nothing to draw: give --schedule or --trace"),
    ],
)
def test_command_refuses(words: list[str], message: str, capsys: Any) -> None:
    assert main(["timeline", *words]) == 2
    assert message in capsys.readouterr().err

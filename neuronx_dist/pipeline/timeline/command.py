"""`neuronx-dist timeline`: pictures of schedules, simulated or recorded."""

from __future__ import annotations

import argparse
import difflib
import math
import runpy
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...command_line import command_parser, count, naming_lines_of
from ..schedule import Costs, Inference, Schedule, training_schedule
from ..schedule.selection import NAMES, check_sizes
from .chart import LEGEND, Chart, simulated, text
from .png import save_png
from .recorded import measured_costs, recorded
from .scene import draw
from .svg import html, svg

__all__ = ["arguments", "run"]

_NARROWEST, _WIDEST = 400, 20_000  # pixels
_EXAMPLE = """\
examples:

  $ neuronx-dist timeline --schedule zb_v --stages 4 --microbatches 8                      # in the terminal
  $ neuronx-dist timeline --schedule 1f1b --schedule zb_v --stages 4 --microbatches 8 --out t.html --out t.png
  $ neuronx-dist timeline --trace trace.json --schedule zb_v --out t.html   # a recorded step, and what could be
  $ neuronx-dist timeline --trace a.json --trace b.json --out t.html        # two runs

A schedule is a name (1f1b, interleaved, gpipe, zb_h1, zb_v, inference), or file.py:name: a schedule, or a function of
the number of stages and of microbatches. All charts have one axis of time, so that their steps compare. Beside a trace
the schedules get its stages, microbatches and measured costs.

Costs are those of a microbatch on a whole stage; with several chunks each takes its share. Memory is in microbatches
whose activations a stage keeps, of all of its layers.
"""


def arguments() -> argparse.ArgumentParser:
    """The argument parser of `timeline`."""
    parser = command_parser(
        "Draws what each stage of a pipeline does at which time: bubble, memory, every task.", _EXAMPLE
    )
    add = parser.add_argument
    add("--schedule", action="append", default=[], metavar="NAME", help="a schedule; several are drawn together")
    add(
        "--trace",
        action="append",
        default=[],
        nargs="+",
        metavar="FILE",
        help="a trace: its files, one for each host; again for another run",
    )
    add("--step", type=int, help="of the trace; default: the last that is complete")
    add("--stages", type=count, help="number of stages (4)")
    add("--microbatches", type=count, help="number of microbatches (8)")
    add("--chunks", type=count, help="pieces of the model on each stage; default: as many as the schedule needs")
    for option, what in (
        ("forward", "the forward of a microbatch on a stage"),
        ("backward-input", "the half of its backward that gives input gradients"),
        ("backward-weight", "the half that gives weight gradients"),
    ):
        add(f"--{option}", type=_time, metavar="TIME", help=f"{what} (1)")
    add("--message", type=_time, metavar="TIME", help="a message between stages (0)")
    add("--out", action="append", default=[], metavar="FILE", help="write .html, .svg or .png; several may be given")
    add("--width", type=_pixels, metavar="PIXELS", help="of the picture; default: 1200, or more if tasks are many")
    return parser


def _time(text: str) -> float:
    time = float(text)
    if not 0 <= time < math.inf:
        raise argparse.ArgumentTypeError(f"a time is a number from 0 on, got {text}")
    return time


def _pixels(text: str) -> int:
    width = int(text)
    if not _NARROWEST <= width <= _WIDEST:
        raise argparse.ArgumentTypeError(f"a picture has a width of {_NARROWEST} to {_WIDEST} pixels, got {text}")
    return width


def run(args: argparse.Namespace) -> int:
    """Draws what `args` name; returns the exit code.

    Raises:
        argparse.ArgumentError: an unknown or impossible schedule; a missing trace; a file of an unknown format.
    """
    for path in args.out:
        if Path(path).suffix not in (".html", ".svg", ".png"):
            raise argparse.ArgumentError(None, f"--out {path}: the name must end in .html, .svg or .png")
        if not Path(path).parent.is_dir():
            raise argparse.ArgumentError(None, f"--out {path}: there is no folder {str(Path(path).parent)!r}")
    if args.step is not None and not args.trace:
        raise argparse.ArgumentError(None, f"--step {args.step} is a step of a trace: give --trace too")
    for option in ("stages", "microbatches"):
        if args.trace and getattr(args, option) is not None:
            raise argparse.ArgumentError(None, f"--{option} goes with --schedule: a trace records it")
    if not args.schedule and not args.trace:
        raise argparse.ArgumentError(None, "nothing to draw: give --schedule or --trace")
    try:
        charts = _charts(args)
        for path in args.out:
            _write(charts, Path(path), args.width)
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        message = str(error).replace("virtual_pipeline_size", "--chunks").replace("schedule='", "--schedule '")
        raise argparse.ArgumentError(None, message) from error
    for chart in charts:
        if args.out:
            print(f"{chart.name}: {chart.shape()}: {chart.summary()}")
        else:
            print(text(chart, shutil.get_terminal_size((120, 24)).columns))
    print(f"wrote {', '.join(args.out)}" if args.out else LEGEND)
    return 0


def _charts(args: argparse.Namespace) -> list[Chart]:
    charts = [recorded(paths, args.step) for paths in args.trace]
    measured = charts[0] if charts else None
    given = {
        "forward": args.forward,
        "backward_input": args.backward_input,
        "backward_weight": args.backward_weight,
        "message": args.message,
    }
    given = {name: value for name, value in given.items() if value is not None}
    costs = replace(measured_costs(measured) if measured else Costs(), **given)
    stages, microbatches = args.stages, args.microbatches
    if measured:
        stages, microbatches = len(measured.stages), measured.num_microbatches
    for name in args.schedule:
        with naming_lines_of("--schedule", name):
            schedule = _schedule(name, stages, microbatches, args.chunks)
            charts.append(simulated(name, schedule, costs, measured.unit if measured else ""))
    return charts


def _schedule(name: str, stages: int | None, microbatches: int | None, chunks: int | None) -> Schedule:
    """The schedule of this name. Sizes of None: the default for a named schedule, its sizes for one from a file."""
    given = stages, microbatches
    stages, microbatches = stages or 4, microbatches or 8
    if chunks is None:
        chunks = 2 if name == "interleaved" else 1
    if name == "inference":
        return Inference(stages, microbatches, training_schedule(stages, microbatches, num_chunks=chunks))
    schedule: Any = name
    file, colon, function = name.rpartition(":")
    if colon:
        if not Path(file).is_file():
            raise ValueError(f"--schedule {name}: there is no file {file!r}")
        names = runpy.run_path(file)
        if function not in names:
            raise ValueError(f"--schedule {name}: {_nearest(function, names)}")
        schedule = names[function]
        if isinstance(schedule, Schedule):
            check_sizes(schedule, given[0] or schedule.num_stages, given[1] or schedule.num_microbatches, chunks)
            return schedule
    elif name not in NAMES:
        raise ValueError(f"--schedule {name}: {_nearest(name, (*NAMES, 'inference'))}, or file.py:name")
    return training_schedule(stages, microbatches, schedule=schedule, num_chunks=chunks)


def _nearest(name: str, names: Iterable[str]) -> str:
    public = sorted(name for name in names if not name.startswith("_"))
    near = difflib.get_close_matches(name, public, n=1, cutoff=0.4)
    return f"there is no {name!r}{(f', but {near[0]!r}' if near else '')} (available: {', '.join(public)})"


def _write(charts: list[Chart], path: Path, width: int | None) -> None:
    scene = draw(charts, width)
    if path.suffix == ".png":
        save_png(scene, path)
    else:
        path.write_text(html(scene) if path.suffix == ".html" else svg(scene), encoding="utf-8")

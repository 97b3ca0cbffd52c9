"""A step of a trace, which `NxDPPModel(trace_file_path=...)` wrote, as a chart."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from statistics import median
from typing import Any

from ..schedule import Costs, Kind, Task, TimedTask
from .chart import Chart

__all__ = ["measured_costs", "recorded"]

MAX_SIZE = 1_000_000  # of a rank, a stage, a step, a microbatch in a trace
MAX_MICROSECONDS = 1e18
_KINDS = {
    "forward": Kind.FORWARD,
    "backward": Kind.BACKWARD,
    "backward_input": Kind.BACKWARD_INPUT,
    "backward_weight": Kind.BACKWARD_WEIGHT,
}


def recorded(paths: Sequence[str], step: int | None = None) -> Chart:
    """The chart of a step of a trace; of several pipelines (data or tensor parallelism) the one of the lowest ranks.

    Args:
        paths: files of the trace, one for each host.
        step: number of the step; None: the last with a backward that all stages have ended, else the last of all.

    Raises:
        ValueError: no trace, a damaged one, a trace without this step, or files of several runs.
    """
    events = [event for path in paths for event in _events(path)]
    tasks, trained = defaultdict(list), set()
    stages_of: dict[int, int] = {}
    for event in events:
        args = event["args"]
        if event["cat"] == "step":
            stages_of[args["step"]] = max(args["stages"], stages_of.get(args["step"], 0))
        else:
            tasks[args["step"]].append(event)
            if event["cat"] != "forward":
                trained.add(args["step"])
    if not stages_of:
        raise ValueError(f"{', '.join(paths)}: this trace has no pipeline step; did the job end before its first step?")
    _check_one_run(tasks, paths)
    complete = [number for number, stages in stages_of.items() if len(_ranks(tasks[number])) == stages]
    if step is None:
        step = max([n for n in complete if n in trained] or complete or stages_of)
    elif step not in stages_of:
        raise ValueError(f"{', '.join(paths)}: there is no step {step}; the trace has {_ranges(sorted(stages_of))}")
    ranks = _ranks(tasks[step])
    outside = [stage for stage in ranks if stage >= stages_of[step]]
    if not ranks or outside:
        what = f"a task of stage {outside[0]} of {stages_of[step]}" if outside else "no tasks"
        raise ValueError(f"{', '.join(paths)}: step {step} has {what}: the trace is damaged; record it again")
    begin = min(event["ts"] for event in tasks[step])
    bars: list[list[TimedTask]] = [[] for _ in range(stages_of[step])]
    for event in sorted(tasks[step], key=lambda event: event["ts"]):
        args = event["args"]
        if event["pid"] == ranks[args["stage"]]:
            task = Task(_KINDS[event["cat"]], args["chunk"], args["microbatch"])
            start = (event["ts"] - begin) / 1e3
            bars[args["stage"]].append(TimedTask(task, start, start + event["dur"] / 1e3))
    return Chart(f"{Path(paths[0]).name}, step {step}", bars, "ms")


def measured_costs(chart: Chart) -> Costs:
    """Median costs of the tasks in a chart, all chunks of a stage together, for a simulation to compare with.

    The halves of a whole backward are assumed equally long.
    """
    durations: dict[Kind, list[float]] = defaultdict(list)
    for bars in chart.stages:
        for task, start, end in bars:
            durations[task.kind].append((end - start) * chart.num_chunks)
    medians = {kind: median(values) for kind, values in durations.items()}
    half = medians.get(Kind.BACKWARD, 0.0) / 2
    return Costs(
        forward=medians.get(Kind.FORWARD, 0.0),
        backward_input=medians.get(Kind.BACKWARD_INPUT, half),
        backward_weight=medians.get(Kind.BACKWARD_WEIGHT, half),
    )


def _events(path: str) -> list[dict[str, Any]]:
    """Returns the steps and tasks of a file, whose fields have the types that `Trace` writes."""
    try:
        events = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise ValueError(f"{path} is not a list of events, as `NxDPPModel(trace_file_path=...)` writes")
    return [event for number, event in enumerate(events) if _is_of_a_chart(f"{path}: event {number}", event)]


def _is_of_a_chart(name: str, event: dict[str, Any]) -> bool:
    """Returns whether an event is a step or a task.

    Raises:
        ValueError: it is damaged.
    """
    category, args = event.get("cat"), event.get("args", {})
    if not isinstance(args, dict) or not isinstance(category, (str, type(None))):
        raise ValueError(f"{name} has args or cat of another type than a trace has: {short(event)}")
    sizes = [args.get(field) for field in ("step", "stages" if category == "step" else "stage")]
    if category in _KINDS:
        sizes += [event.get("pid"), args.get("chunk"), args.get("microbatch")]
        times: list[Any] = [event.get("ts"), event.get("dur")]
        if not all(isinstance(time, (int, float)) and abs(time) < MAX_MICROSECONDS for time in times) or times[1] < 0:
            raise ValueError(
                f"{name}, a {category}, has ts and dur {short(times)}: both are numbers, and dur is from 0 on"
            )
    elif category != "step":
        if category != "idle" and "microbatch" in args:
            raise ValueError(f"{name} has the unknown cat {short(category)}; tasks are {', '.join(_KINDS)}")
        return False
    if not all(isinstance(size, int) and 0 <= size <= MAX_SIZE for size in sizes):
        raise ValueError(
            f"{name}, a {category}, has no step, stage, chunk, microbatch or pid, or one that is no number from 0 to "
            f"{MAX_SIZE} (MAX_SIZE): {short(event)}"
        )
    return True


def _check_one_run(tasks: Mapping[int, Sequence[dict[str, Any]]], paths: Sequence[str]) -> None:
    for step, events in tasks.items():
        seen = set()
        for event in events:
            args = event["args"]
            task = (event["pid"], event["cat"], args["chunk"], args["microbatch"])
            if task in seen:
                raise ValueError(
                    f"--trace {' '.join(paths)}: rank {event['pid']} does the {event['cat']} of microbatch "
                    f"{args['microbatch']} twice in step {step}: the files contain one file twice, or several runs. "
                    "Pass the files of all hosts of one run to one --trace; to compare runs write --trace a.json "
                    "--trace b.json"
                )
            seen.add(task)


def _ranks(tasks: Sequence[dict[str, Any]]) -> dict[int, int]:
    """The lowest rank of each stage."""
    ranks: dict[int, int] = {}
    for event in tasks:
        stage = event["args"]["stage"]
        ranks[stage] = min(event["pid"], ranks.get(stage, event["pid"]))
    return ranks


def _ranges(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"

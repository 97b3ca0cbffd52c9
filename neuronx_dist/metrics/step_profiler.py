"""torch.profiler's trace of some steps of a rank, with the collectives, the tasks and the pipeline's timeline in it.

    with profile_steps("run/profile.json", 3, pipeline=model) as profiler:
        for batch in loader:
            train_step(batch)
            profiler.step()

Open the file in ui.perfetto.dev. Collectives are ranges by verb and axis (`all_reduce tp`), from their start to their
end; asynchronous ones to the end of the wait for them.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from .. import comm
from ..comm import recording

__all__ = ["profile_steps"]

_TASKS = ("forward", "backward", "backward_input", "backward_weight")  # categories of the pipeline's trace


@contextmanager
def profile_steps(path: str | os.PathLike[str], steps: int, *, skip: int = 1, pipeline: Any = None) -> Iterator[Any]:
    """Profiles `steps` steps of a loop on this rank, and writes a trace of Chrome and Perfetto after the last of them.

    Args:
        path: of the trace, one for each rank.
        skip: steps before them: the first one builds what later ones use. One more step warms the profiler up.
        pipeline: a `NxDPPModel` without `trace_file_path`: its tasks, waits and messages are recorded in these steps,
            of all ranks of the host, and are a part of the trace. All ranks profile then.

    Yields:
        An object whose `step()` is called after each step.

    Raises:
        ValueError: no step is to be profiled, or the pipeline writes a trace already.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: profile at least 1")
    if pipeline is not None and pipeline.trace_file_path is not None:
        raise ValueError(
            f"the pipeline writes its trace to {pipeline.trace_file_path}: leave trace_file_path out, or pipeline"
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    names = _Names(comm.rank("world") if comm.is_initialized() else None)
    run = _ProfiledSteps(path, pipeline, names)
    plan = schedule(skip_first=skip, wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan, on_trace_ready=run.write) as profiler:
        run.profiler, run.left = profiler, skip + 1
        run.begin_if_due()
        try:
            yield run
        except BaseException:
            run.has_failed = True
            raise
        finally:
            run.end()
    if not run.is_written:
        warnings.warn(f"no profile is in {path}: the loop made less than {skip + 2} steps", stacklevel=3)


class _Names:
    """Opens a range of the profiler for each collective of a rank (`comm.recording`)."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank
        self._open: defaultdict[tuple[str, str], deque[Any]] = defaultdict(deque)

    def add(self, call: recording.Call) -> None:
        event, _, verb = call.verb.rpartition(":")
        started = self._open[verb, call.axis]
        if not event:
            started.append(record_function(f"{verb} {call.axis}"))
            started[-1].__enter__()
        elif started:  # awaited collectives end in the order in which they started
            (started.popleft() if event == "wait" else started.pop()).__exit__(None, None, None)


class _ProfiledSteps:
    """The profiled steps: what is switched on before them, and written after them."""

    profiler: Any
    left: int  # steps until the first profiled one
    has_failed = False  # with an error: other ranks do not come to a barrier
    is_written = False

    def __init__(self, path: Path, pipeline: Any, names: _Names) -> None:
        self._path, self._pipeline, self._names = path, pipeline, names
        self._active = False

    def step(self) -> None:
        """Ends a step."""
        self.left -= 1
        self.profiler.step()
        self.begin_if_due()

    def begin_if_due(self) -> None:
        if self.left == 0:
            self._active = True
            recording.attach(self._names)
            if self._pipeline is not None:
                self._pipeline.trace_file_path = str(_timeline(self._path))

    def end(self) -> None:
        if self._active:
            self._active = False
            recording.detach(self._names)
            if self._pipeline is not None:
                self._pipeline.trace_file_path = None

    def write(self, profiler: Any) -> None:
        self.end()
        profiler.export_chrome_trace(str(self._path))
        self.is_written = True
        if self._pipeline is not None and self._names.rank is not None and not self.has_failed:
            comm.barrier()  # all ranks have written their timeline
            _merge(self._path, _timeline(self._path), self._names.rank)


def _timeline(path: Path) -> Path:
    return path.with_name("pipeline_timeline.json")  # of all ranks


def _merge(path: Path, timeline: Path, rank: int) -> None:
    """Adds the timeline to a profile, on the profile's clock: the last runs of a task end at one time in both."""
    content = json.loads(path.read_text())
    events = json.loads(timeline.read_text()) if timeline.exists() else []
    recorded = _last_ends(event for event in events if event.get("cat") in _TASKS and event["pid"] == rank)
    profiled = _last_ends(event for event in content["traceEvents"] if event.get("name") in recorded)
    if not profiled:
        return
    shift = median(end - recorded[name] for name, end in profiled.items())
    for event in events:
        event["pid"] = f"pipeline rank {event['pid']}"
        if "ts" in event:
            event["ts"] += shift
    content["traceEvents"] += events
    path.write_text(json.dumps(content))


def _last_ends(events: Iterator[Mapping[str, Any]]) -> dict[str, float]:
    return {event["name"]: event["ts"] + event["dur"] for event in sorted(events, key=lambda event: event["ts"])}

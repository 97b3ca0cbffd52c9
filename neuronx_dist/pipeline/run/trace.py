"""Trace of a rank's steps, for Perfetto (ui.perfetto.dev) and for `neuronx-dist timeline --trace`.

A rank is a process of the trace. It has a track of its tasks and of its waits for messages, which do not overlap, a
track of steps, tracks of its collectives, sends and receives, and a counter of the saved activations. Arrows go
from the task that sends to the one that receives.

Without a trace nothing here is called: a `Trace` puts itself between executor and transport, and attaches itself to
`comm.recording`.
"""

from __future__ import annotations

import itertools
import json
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import record_function

from ... import accelerator, comm
from ...comm import recording
from ..schedule import Kind, Schedule, Task
from .trace_file import open_together
from .transport import Transport

__all__ = ["Trace"]

STEPS, TASKS = 0, 1  # tracks
CATEGORIES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight",
}


class _HostClock:
    """Nanoseconds of `time.perf_counter_ns`."""

    def start(self) -> None:
        pass

    def now(self) -> Any:
        return time.perf_counter_ns()

    def nanoseconds(self, moment: Any) -> int:
        return int(moment)


class _DeviceClock:
    """Times at which the device reaches what the host launches: events on the current stream, read after a step."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def start(self) -> None:
        """Waits for the device."""
        self._first = self.now()
        self._first.synchronize()
        self._host = time.perf_counter_ns()

    def now(self) -> Any:
        event = accelerator.timing_event(self._device_type)
        event.record()
        return event

    def nanoseconds(self, moment: Any) -> int:
        moment.synchronize()
        return self._host + int(1e6 * self._first.elapsed_time(moment))


class _Event(NamedTuple):
    """An event of the trace, with its begin and end on a clock."""

    fields: Mapping[str, Any]
    begin: Any
    end: Any = None  # None: no duration


class _Started(NamedTuple):
    """A collective that has not ended."""

    call: recording.Call
    begin: Any
    task: Task | None  # the send that it belongs to


class Trace:
    """Records a rank's events, from its first pass until the model is collected, or a pass fails.

    Times are those of the host. On an accelerator with timed events (CUDA) they are of the device, for which each
    step ends with a wait. On XLA a task is recorded when its program is built, and not when the device runs it.

    Args:
        path: of the file; see `open_together`. An existing file is overwritten.
        device: where the stage computes.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        context = comm.current()
        self.rank = context.rank
        self._context = context
        self._file = open_together(path)
        self._device_clock = accelerator.timing_event(device.type) is not None
        self._clock = _DeviceClock(device.type) if self._device_clock else _HostClock()
        self._events: list[_Event] = []
        self._started: dict[tuple[str, str], deque[_Started]] = {}
        # Numbers that join the two ends of a collective, unique among all processes of the trace.
        self._numbers = itertools.count(self.rank, context.mesh.world_size)
        self._steps = itertools.count()
        self.sending: Task | None = None
        self._clock.start()
        self._file.append(self._names())

    def closed_with(self, owner: object) -> Trace:
        """Closes the trace when `owner` is collected, the process ends, or `end()` is called; returns the trace."""
        self.end = weakref.finalize(owner, self.close)
        return self

    def close(self) -> None:
        """Writes the remaining events, and ends the trace."""
        recording.detach(self)
        self.flush()
        self._file.close()

    def watch(self, transport: Transport, schedule: Schedule, stage: int) -> Transport:
        """Wraps a transport so that a pass is recorded; returns the transport itself if the file is full."""
        if self._file.full:
            return transport
        return _WatchedTransport(self, transport, schedule, stage, next(self._steps))

    # --- events

    def now(self) -> Any:
        return self._clock.now()

    def begin_step(self) -> Any:
        self.flush()  # events after the last step
        recording.detach(self)
        recording.attach(self)
        self._clock.start()
        return self.now()

    def end_task(self) -> None:
        """Writes the events so far, where that needs no wait for a device."""
        if not self._device_clock:
            self.flush()

    def box(self, name: str, track: int, begin: Any, end: Any, category: str, args: Mapping[str, Any]) -> None:
        """A box on a track."""
        fields = {"ph": "X", "name": name, "cat": category, "pid": self.rank, "tid": track, "args": args}
        self._events.append(_Event(fields, begin, end))

    def arrow(self, number: int, begin: Any, *, starts: bool) -> None:
        """An end of an arrow between tasks, with a number that both ends know."""
        fields = {"name": "message", "cat": "message", "id": number, "pid": self.rank, "tid": TASKS}
        self._events.append(_Event({"ph": "s", **fields} if starts else {"ph": "f", "bp": "e", **fields}, begin))

    def counter(self, begin: Any, forwards: int) -> None:
        fields = {"ph": "C", "name": "activations kept", "pid": self.rank, "args": {"forwards": forwards}}
        self._events.append(_Event(fields, begin))

    def add(self, call: recording.Call) -> None:
        """A collective starts or ends (`comm.recording`)."""
        if not comm.is_initialized() or comm.current() is not self._context:
            return  # another rank is played in this process
        event, _, verb = call.verb.rpartition(":")
        started = self._started.setdefault((verb, call.axis), deque())
        if not event:
            started.append(_Started(call, self.now(), self.sending if verb == "send" else None))
        elif started:  # awaited collectives end in the order in which they started
            self._collective(*(started.popleft() if event == "wait" else started.pop()), self.now())

    def flush(self) -> None:
        """Writes all events. Collectives that are not awaited yet stay for later."""
        events, self._events = self._events, []
        written: list[dict[str, Any]] = []
        for fields, begin, end in events:
            start = self._clock.nanoseconds(begin) - self._file.origin
            event = {**fields, "ts": start / 1e3}
            if end is not None:
                stop = self._clock.nanoseconds(end) - self._file.origin
                if fields["ph"] == "X":
                    event["dur"] = (stop - start) / 1e3
                else:  # an event that may overlap others of its track is two events
                    written.append(event)
                    event = {key: fields[key] for key in ("name", "cat", "id", "pid", "tid")}
                    event |= {"ph": "e", "ts": stop / 1e3}
            written.append(event)
        self._file.append(written)

    def _collective(self, call: recording.Call, begin: Any, task: Task | None, end: Any) -> None:
        category = {"send": "send", "recv": "receive"}.get(call.verb, "collective")
        args = {
            "bytes": call.bytes,
            "shape": list(call.shape),
            "dtype": str(call.dtype).removeprefix("torch."),
            "axis": call.axis,
            "ranks": call.group_size,
        }
        if call.op is not None:
            args["op"] = call.op
        if task is not None:
            args["task"] = str(task)
        # Perfetto makes a track for each name, and rows of it where they overlap.
        fields = {"ph": "b", "name": f"{call.verb} {call.axis}", "cat": category, "id": next(self._numbers)}
        self._events.append(_Event({**fields, "pid": self.rank, "tid": TASKS, "args": args}, begin, end))

    def _names(self) -> list[dict[str, Any]]:
        mesh = self._context.mesh
        coordinates = [f"stage {mesh.coordinate('pp', self.rank)}"]
        coordinates += [
            f"{axis} {mesh.coordinate(axis, self.rank)}" for axis in ("dp", "cp", "tp") if mesh.size(axis) > 1
        ]
        values: dict[str, dict[str, Any]] = {"process_name": {"name": f"rank {self.rank}: {', '.join(coordinates)}"}}
        values["process_sort_index"] = {"sort_index": self.rank}
        events = [{"ph": "M", "name": name, "pid": self.rank, "args": args} for name, args in values.items()]
        for track, name in ((STEPS, "steps"), (TASKS, "tasks")):
            fields = {"ph": "M", "pid": self.rank, "tid": track}
            events.append({**fields, "name": "thread_name", "args": {"name": name}})
            events.append({**fields, "name": "thread_sort_index", "args": {"sort_index": track}})
        return events


def _said(error: BaseException) -> str:
    """The text of an error, short enough for an event: in JSON a character takes up to 12 bytes."""
    text = f"{type(error).__name__}: {error}"[:500]
    return text if len(json.dumps(text)) <= 3000 else text[:250]


class _WatchedTransport:
    """A transport that reports each task and message of one pass to a trace."""

    def __init__(self, trace: Trace, transport: Transport, schedule: Schedule, stage: int, step: int) -> None:
        self._trace = trace
        self._transport = transport
        self._schedule = schedule
        self._stage = stage
        self._step = step
        self._trains = schedule.trains
        self._kept: dict[
            tuple[int, int], set[Kind]
        ] = {}  # by chunk and microbatch: halves of backward that are to come
        self._begin: Any = None  # of the present task
        self._received: list[int] = []  # arrows that end at the present task
        self._sent: list[int] = []  # arrows that start at the present task

    def run(self, compute: Callable[[Task], None]) -> None:
        trace, schedule = self._trace, self._schedule
        begin = trace.begin_step()
        args = {
            "step": self._step,
            "stage": self._stage,
            "schedule": type(schedule).__name__,
            "stages": schedule.num_stages,
            "chunks": schedule.num_chunks,
            "microbatches": schedule.num_microbatches,
        }
        try:
            self._transport.run(lambda task: self._compute(compute, task))
        except BaseException as error:
            args["error"] = _said(error)
            recording.detach(trace)  # until the next pass, if there is one
            raise
        finally:
            trace.sending = None
            trace.box(f"step {self._step}: {args['schedule']}", STEPS, begin, trace.now(), "step", args)
            trace.flush()

    def give(self, send: Task, tensors: list[torch.Tensor]) -> None:
        self._trace.sending = send  # which starts when the present task is over
        self._sent.append(self._number(self._stage, send))
        self._transport.give(send, tensors)

    def take(self, receive: Task) -> list[torch.Tensor]:
        begin = self._trace.now()
        tensors = self._transport.take(receive)
        self._begin = self._trace.now()
        self._trace.box(f"wait {receive}", TASKS, begin, self._begin, "idle", self._args(receive))
        sender = self._schedule.peer(self._stage, receive)
        assert sender is not None
        self._received.append(self._number(*sender))
        return tensors

    def _compute(self, compute: Callable[[Task], None], task: Task) -> None:
        trace = self._trace
        self._begin = trace.now()
        self._received, self._sent = [], []
        args = self._args(task)
        try:
            with record_function(str(task)):  # a range of torch.profiler, if that is on
                compute(task)
        except BaseException as error:
            args["error"] = _said(error)
            raise
        finally:
            begin, end = self._begin, trace.now()
            trace.box(str(task), TASKS, begin, end, CATEGORIES[task.kind], args)
        for number in self._received:
            trace.arrow(number, begin, starts=False)
        for number in self._sent:
            trace.arrow(number, begin, starts=True)
        if self._trains:
            self._count(task)
            trace.counter(begin if task.kind is Kind.FORWARD else end, len(self._kept))
        trace.end_task()

    def _count(self, task: Task) -> None:
        halves = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
        if task.kind is Kind.FORWARD:
            self._kept[task[1:]] = halves
        else:
            left = self._kept.pop(task[1:], set()) - (halves if task.kind is Kind.BACKWARD else {task.kind})
            if left:
                self._kept[task[1:]] = left

    def _args(self, task: Task) -> dict[str, Any]:
        return {"step": self._step, "stage": self._stage, "chunk": task.chunk, "microbatch": task.microbatch}

    def _number(self, stage: int, send: Task) -> int:
        """Number of a message: equal at both ends, and different from all other messages of the job."""
        schedule, mesh = self._schedule, comm.current().mesh
        pipeline = self._trace.rank % (mesh.world_size // mesh.pp)
        number = self._step * schedule.num_virtual_stages + schedule.virtual_stage(stage, send.chunk)
        number = 2 * (number * schedule.num_microbatches + send.microbatch) + (send.kind is Kind.SEND_BACKWARD)
        return number * (mesh.world_size // mesh.pp) + pipeline

"""`trace_file_path`: what a trace has of a pass, that it is JSON whatever happens to the job, and free when off."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from neuronx_dist import comm, spmd
from neuronx_dist.comm import recording
from neuronx_dist.comm.backends import threads
from neuronx_dist.mesh import Mesh
from neuronx_dist.pipeline import Kind, NxDPPModel, OneFOneB, Schedule, Task
from neuronx_dist.pipeline.run import trace, trace_file
from neuronx_dist.pipeline.schedule import Inference
from neuronx_dist.pipeline.schedule.tasks import RECEIVES
from tests.support.pipeline_models import Block, Model, batch, make, on_ranks
from tests.support.pool import WorkerFailure, processes
from tests.support.toy_schedules import GPipe, Halves, ThereAndBack

pytestmark = pytest.mark.slow  # together more than the fast tier has room for

OPTIONS: dict[str, Any] = {"num_microbatches": 4, "output_loss_value_spec": True}
KINDS = {name: kind for kind, name in trace.CATEGORIES.items()}


def events_of(path: Path) -> list[dict[str, Any]]:
    gc.collect()  # a trace ends with its model
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    return events


def run(path: Path, mesh: Mesh, *schedules: Schedule, **options: Any) -> list[dict[str, Any]]:
    """The events of passes of these schedules."""
    options = {**OPTIONS, "trace_file_path": str(path), **options}
    on_ranks(mesh, make(), lambda p: [p.run(schedule, batch()) for schedule in schedules] and None, **options)
    return events_of(path)


def tasks_of(events: list[dict[str, Any]], rank: int, step: int) -> list[Task]:
    """In the order of time."""
    boxes = [e for e in events if e["pid"] == rank and e.get("cat") in KINDS and e["args"]["step"] == step]
    boxes.sort(key=lambda e: e["ts"])
    return [Task(KINDS[e["cat"]], e["args"]["chunk"], e["args"]["microbatch"]) for e in boxes]


@pytest.mark.parametrize("schedule_class,chunks", [(OneFOneB, 1), (Halves, 1), (ThereAndBack, 2)])
def test_every_task_has_a_box_and_boxes_do_not_overlap(
    schedule_class: type[Schedule], chunks: int, tmp_path: Path
) -> None:
    schedule = schedule_class(2, 4)
    options = {} if chunks == 1 else {"schedule": schedule_class}
    events = run(tmp_path / "trace.json", Mesh(4, pp=2), schedule, schedule, **options)
    assert {e["pid"] for e in events} == {0, 1, 2, 3}
    for rank, step in itertools.product(range(4), range(2)):
        stage = rank // 2
        assert tasks_of(events, rank, step) == schedule.computations(stage)
        mine = [e for e in events if e["pid"] == rank and e["ph"] == "X" and e["args"]["step"] == step]
        waits = sorted(e["name"] for e in mine if e["cat"] == "idle")
        assert waits == sorted(f"wait {task}" for task in schedule.tasks(stage) if task.kind in RECEIVES)
        boxes = sorted((e for e in mine if e["tid"] == trace.TASKS), key=lambda e: e["ts"])
        assert all(one["ts"] + one["dur"] <= other["ts"] + 0.002 for one, other in itertools.pairwise(boxes))
        (whole,) = (e for e in mine if e["cat"] == "step")
        assert (
            whole["ts"] <= boxes[0]["ts"] and boxes[-1]["ts"] + boxes[-1]["dur"] <= whole["ts"] + whole["dur"] + 0.002
        )
        assert whole["args"]["stage"] == stage and whole["args"]["stages"] == 2 and whole["args"]["chunks"] == chunks
        counts = [e["args"]["forwards"] for e in events if e["pid"] == rank and e["ph"] == "C"]
        assert max(counts) == schedule.peak_in_flight(stage) and counts[-1] == 0


def test_arrows_go_from_the_task_that_sends_to_the_one_that_receives(tmp_path: Path) -> None:
    """Also from step to step and pipeline to pipeline no two have one number."""
    schedule = OneFOneB(3, 4)
    events = run(tmp_path / "trace.json", Mesh(6, pp=3), schedule, schedule)
    starts, ends = ([e for e in events if e["ph"] == letter] for letter in "sf")
    assert len(starts) == len(ends) == 2 * 2 * 4 * 4  # pipelines, steps, microbatches, boundaries both ways
    assert {e["id"] for e in starts} == {e["id"] for e in ends} and len({e["id"] for e in ends}) == len(ends)

    def task_at(event: dict[str, Any]) -> dict[str, Any]:
        boxes = [e for e in events if e["ph"] == "X" and e["pid"] == event["pid"] and e.get("cat") in KINDS]
        (box,) = (e for e in boxes if e["ts"] <= event["ts"] < e["ts"] + e["dur"])
        return box

    by_number = {e["id"]: e for e in ends}
    for start in starts:
        sender, receiver = task_at(start), task_at(by_number[start["id"]])
        assert sender["name"] == receiver["name"] and sender["args"]["step"] == receiver["args"]["step"]
        assert (sender["pid"] - receiver["pid"]) in (2, -2) and sender["ts"] < receiver["ts"]


def test_collectives_are_those_of_comm_record(tmp_path: Path) -> None:
    """Messages and the reduction of gradients, with bytes; each ends after it began, in a track of its own."""

    def use(pipeline: NxDPPModel) -> list[comm.Call]:
        with comm.record() as calls:
            pipeline.run_train(**batch())
        return calls

    path = tmp_path / "trace.json"
    model = make(tied=True)
    warm = on_ranks(Mesh(4, pp=2), model, use, **OPTIONS, trace_file_path=str(path))
    events = events_of(path)
    for rank, calls in enumerate(warm):
        begins = [e for e in events if e["ph"] == "b" and e["pid"] == rank]
        ends = {e["id"]: e for e in events if e["ph"] == "e"}
        in_trace = Counter((e["name"], e["args"]["bytes"], tuple(e["args"]["shape"])) for e in begins)
        # What came before the trace was opened, in the first pass: tied weights made equal.
        recorded = Counter((f"{c.verb} {c.axis}", c.bytes, c.shape) for c in calls)
        missing = recorded - in_trace
        assert not in_trace - recorded and {name.split()[0] for name, _, _ in missing} <= {"broadcast", "all_reduce"}
        assert in_trace["all_reduce dp,cp"] == 0 and any(name == "all_reduce dp,cp" for name, _, _ in in_trace)
        assert all(e["ts"] <= ends[e["id"]]["ts"] for e in begins) and len({e["id"] for e in begins}) == len(begins)
        assert {e["cat"] for e in begins} == {"send", "receive", "collective"}
        sends = {e["args"]["task"] for e in begins if e["cat"] == "send"}
        assert sends == {f"S{'F' if rank < 2 else 'B'}{microbatch}" for microbatch in range(4)}
    assert len({e["id"] for e in events if e["ph"] == "b"}) == sum(e["ph"] == "b" for e in events)


def test_without_a_path_nothing_is_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free when off: no trace, no transport around the transport, nobody who listens to collectives."""
    objects: list[str] = []
    monkeypatch.setattr(trace.Trace, "__init__", lambda *args: objects.append("trace"))
    monkeypatch.setattr(trace._WatchedTransport, "__init__", lambda *args: objects.append("transport"))
    notes: list[Any] = []
    monkeypatch.setattr(recording, "note", lambda *args, **options: notes.append(args))
    monkeypatch.chdir(tmp_path)
    on_ranks(Mesh(2, pp=2), make(), lambda p: p.run_train(**batch()), **OPTIONS)
    assert objects == [] and notes == [] and recording.recorders == () and list(tmp_path.iterdir()) == []


def test_a_trace_ends_with_its_model(tmp_path: Path) -> None:
    run(tmp_path / "trace.json", Mesh(2, pp=2), OneFOneB(2, 4))
    assert recording.recorders == ()


def test_a_pass_in_lockstep_has_its_permutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.ThreadsBackend, "has_messages", False)
    events = run(tmp_path / "trace.json", Mesh(2, pp=2), OneFOneB(2, 4))
    assert tasks_of(events, 1, 0) == OneFOneB(2, 4).computations(1)
    names = Counter(e["name"] for e in events if e["ph"] == "b" and e["pid"] == 1)
    assert names == {"permute pp_forward": 4, "permute pp_backward": 4}


def test_evaluation_keeps_nothing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "trace.json"  # which is made
    events = run(path, Mesh(2, pp=2), Inference(2, 4))
    assert tasks_of(events, 1, 0) == Inference(2, 4).computations(1) and not any(e["ph"] == "C" for e in events)


class Breaking(Block):
    """Fails in the third forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(_third(self, x), mask)


def _third(layer: Breaking, x: torch.Tensor) -> torch.Tensor:
    if type(x) is torch.Tensor:  # no fake tensor of a recording
        layer.calls += 1
        if layer.calls == 3:
            if not isinstance(comm.current().backend, threads.ThreadsBackend):
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError("the third")
    return x


def breaking() -> Model:
    model = make()
    model.layers[3] = Breaking().double()
    return model


def test_a_task_that_fails_is_the_last_of_its_rank(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ZeroDivisionError, match="F2 on stage 1"):
        on_ranks(Mesh(2, pp=2), breaking(), lambda p: p.run(GPipe(2, 4), batch()), **OPTIONS, trace_file_path=str(path))
    boxes = [e for e in events_of(path) if e["ph"] == "X" and e["pid"] == 1]
    errors = {e["name"]: e["args"]["error"] for e in boxes if "error" in e["args"]}
    assert errors.keys() == {"F2", "step 0: GPipe"} and all("the third" in text for text in errors.values())
    assert max(boxes, key=lambda e: e["ts"])["name"] == "F2"


def _train_until_killed(path: str) -> None:
    model = NxDPPModel(breaking(), transformer_layer_cls=Block, auto_partition=True, trace_file_path=path, **OPTIONS)
    model.run(GPipe(2, 4), batch())


def test_a_job_that_is_killed_leaves_a_trace_that_opens(tmp_path: Path) -> None:
    """With all tasks that were over; both processes write to one file."""
    path = tmp_path / "trace.json"
    with pytest.raises(WorkerFailure):
        processes(2).run(_train_until_killed, str(path), mesh={"pp": 2})
    events = events_of(path)
    assert tasks_of(events, 1, 0) == [Task(Kind.FORWARD, 0, 0), Task(Kind.FORWARD, 0, 1)]
    assert len(tasks_of(events, 0, 0)) >= 3


@pytest.mark.slow
def test_killed_at_any_time(tmp_path: Path) -> None:
    """A process that does nothing but append, among others that do."""
    path = tmp_path / "trace.json"
    trace_file.TraceFile.create(path, {})
    counts = []
    for attempt in range(20):
        children = [_append_for_ever(path, number) for number in range(2)]
        time.sleep(0.01 + 0.001 * attempt)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        events = json.loads(path.read_text())
        counts.append(len(events))
    assert counts == sorted(counts) and counts[-1] > 1000


def _append_for_ever(path: Path, child: int) -> int:
    """Starts a process; returns its id."""
    process = os.fork()
    if process == 0:
        file = trace_file.TraceFile(path, 0)
        for number in itertools.count():
            file.append([{"child": child, "number": number, "text": "x" * (number * 37 % 900)}] * 3)
    return process


def test_ranks_append_to_one_file_without_a_loss(tmp_path: Path) -> None:
    """Every event is there once, in the order in which its rank wrote it, whoever made the file larger."""
    path = tmp_path / "trace.json"
    trace_file.TraceFile.create(path, {})
    files = [trace_file.TraceFile(path, 0) for _ in range(3)]
    expected: list[list[int]] = [[], [], []]
    for number in range(600):
        rank = number * number % 3
        count = 1 + number % 4
        files[rank].append([{"rank": rank, "number": number, "text": "x" * (number * 131 % 3500)}] * count)
        expected[rank] += [number] * count
    events = json.loads(path.read_text())
    for rank, numbers in enumerate(expected):
        assert [event["number"] for event in events if event.get("rank") == rank] == numbers
    assert path.stat().st_size > 1 << 20 and [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


def test_events_that_fill_pages_to_the_last_byte(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace_file.TraceFile.create(path, {})
    file = trace_file.TraceFile(path, 0)
    for count in range(400):
        file.append([{"text": "x" * (1024 - len(',\n{"text":""}'))}])
        assert len(json.loads(path.read_text())) == count + 2


@pytest.mark.parametrize("character", ["x", "字", "\U0001f600", "\x00", "\ud800"], ids=ascii)
def test_a_long_message_of_any_characters_fits_in_a_page(character: str, tmp_path: Path) -> None:
    """In JSON a character takes up to 12 bytes."""
    path = tmp_path / "trace.json"

    def fail(pipeline: NxDPPModel) -> None:
        pipeline.run_train(**batch())
        pipeline.original_module.layers[0].register_forward_hook(lambda *_: _raise(ValueError(character * 2000)))
        pipeline.run_train(**batch())

    with pytest.raises(ValueError):
        on_ranks(Mesh(1), make(), fail, **OPTIONS, trace_file_path=str(path))
    trace_file.TraceFile(path, 0).append([{"name": "of another rank"}])
    errors = [e["args"]["error"] for e in events_of(path) if "error" in e.get("args", {})]
    assert len(errors) == 2 and all(100 * character in text for text in errors)


def _raise(error: Exception) -> None:
    raise error


def test_an_event_of_more_than_a_page_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace_file.TraceFile.create(path, {})
    file = trace_file.TraceFile(path, 0)
    for size in (4096, 4097, 9000, 10):
        file.append([{"text": "x" * (size - len(',\n{"text":""}'))} if size > 10 else {"last": True}])
    file.append([{"text": "y" * 9000}, {"last": True}])
    events = json.loads(path.read_text())
    assert [len(event.get("text", "")) for event in events] == [0, 4096 - len(',\n{"text":""}'), 0, 0]
    assert events[-1] == events[-2] == {"last": True}


def test_a_deleted_file_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace_file.TraceFile.create(path, {})
    file = trace_file.TraceFile(path, 0)
    path.unlink()
    file.append([{"number": 1}])
    assert file.full and not path.exists()


def test_two_hosts_have_a_file_each_and_one_time_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of each host counts from some moment of its own."""
    skew = {"north": 0, "south": 10**15}
    monkeypatch.setattr(trace_file, "socket", SimpleNamespace(gethostname=lambda: ("north", "south")[comm.rank("pp")]))
    clock = SimpleNamespace(perf_counter_ns=lambda: time.perf_counter_ns() + skew[trace_file.socket.gethostname()])
    monkeypatch.setattr(trace_file, "time", clock)
    monkeypatch.setattr(trace, "time", clock)
    on_ranks(Mesh(2, pp=2), make(), lambda p: p.run_train(**batch()), **OPTIONS, trace_file_path=f"{tmp_path}/t.json")
    gc.collect()
    north, south = (json.loads((tmp_path / f"t-{host}.json").read_text()) for host in skew)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t-north.json", "t-south.json"]
    assert {e["pid"] for e in north} == {0} and {e["pid"] for e in south} == {1}
    for one, other in (("B0", "B0"), ("F0", "F0")):
        times = [next(e["ts"] for e in events if e["name"] == name) for events, name in ((north, one), (south, other))]
        assert abs(times[0] - times[1]) < 60e6  # microseconds


def test_a_file_that_is_full_gets_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_file, "_LIMIT", 70_000)
    events = run(tmp_path / "trace.json", Mesh(2, pp=2), *[OneFOneB(2, 4)] * 8)
    steps = {e["args"]["step"] for e in events if e["ph"] == "X"}
    assert 0 in steps and 7 not in steps and (tmp_path / "trace.json").stat().st_size == 65_536


def test_a_check_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def build() -> NxDPPModel:
        return NxDPPModel(
            Model(), transformer_layer_cls=Block, auto_partition=True, trace_file_path=str(path), **OPTIONS
        )

    assert spmd.check(build, batch(), mesh={"pp": 2}).ok
    assert not path.exists()


def test_on_cuda_times_are_those_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are recorded on the stream, and read when the step is over: nothing waits for the device before."""
    log: list[str] = []

    class Event:
        count = 0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.count += 1
            self.number = Event.count  # milliseconds
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return other.number - self.number

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(trace, "_HostClock", trace._DeviceClock)
    with comm.as_rank(Mesh(1), 0):
        recorder = trace.Trace(str(tmp_path / "trace.json"), torch.device("cuda"))
        begin = recorder.begin_step()
        log.clear()
        end = recorder.now()
        recorder.box("F0", trace.TASKS, begin, end, "forward", {"step": 0})
        recorder.end_task()
        assert "wait" not in log
        recorder.close()
    (box,) = (e for e in json.loads((tmp_path / "trace.json").read_text()) if e["ph"] == "X")
    assert box["dur"] == pytest.approx(1000)

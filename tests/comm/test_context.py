"""Contexts: this rank and its mesh, their communicators, joining a job, the device's random numbers."""

from __future__ import annotations

import datetime
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import comm
from neuronx_dist.comm import context, generators, launch, recording
from neuronx_dist.comm.backends import c10d, shapes
from neuronx_dist.comm.context import Context
from neuronx_dist.mesh import Mesh

MESH = Mesh(8, tp=2, pp=2)
SHAPES = shapes.ShapesBackend()


class Counting(shapes.ShapesBackend):
    """Counts what is made: label, ranks, whether the connection is to be its own."""

    def __init__(self) -> None:
        self.made: list[tuple[str, tuple[int, ...], bool]] = []

    def communicator(self, label: str, groups: Any, global_rank: int, separate: bool = False) -> Any:
        communicator = super().communicator(label, groups, global_rank, separate)
        self.made.append((label, communicator.ranks, separate))
        return communicator


# --- contexts


def test_a_communicator_is_made_once_for_each_axis() -> None:
    here = Context(MESH, 5, backend := Counting())
    assert (here.mesh, here.rank, here.backend, here.extras) == (MESH, 5, backend, {})
    for axis in ("tp", ("dp", "cp"), "tp", ("dp", "cp"), "cp"):
        assert here.communicator(axis) is here.communicator(axis)
    assert backend.made == [("tp", (4, 5), False), ("dp,cp", (5, 7), False), ("cp", (5,), False)]
    assert here.communicator("tp").axis_sizes == {"tp": 2} and here.communicator(("dp", "cp")).axis_sizes == MESH.sizes(
        ("dp", "cp")
    )
    assert here.communicator(here.communicator("tp")) is here.communicator("tp")
    group = object()
    here.register(group, here.communicator("tp"))
    assert here.communicator(group) is here.communicator("tp") and len(backend.made) == 3


def test_groups_over_lists_of_ranks() -> None:
    here = Context(MESH, 5, backend := Counting())
    along = here.new_group(MESH.groups(("dp", "tp")), "mine")
    lists = here.new_group([[4, 5], [0, 1]], "lists")
    crossed = here.new_group([[0, 5]], "crossed")
    assert here.new_group([[0, 4]], "others") is None
    assert backend.made == [
        ("mine", (4, 5, 6, 7), True), ("lists", (4, 5), True), ("crossed", (0, 5), True), ("others", (5,), True),
    ]  # fmt: skip
    assert [group.axis_sizes for group in (along, lists, crossed)] == [{"dp": 2, "tp": 2}, {"tp": 2}, {}]
    other = Context(Mesh(8, tp=4), 5, Counting()).new_group(MESH.groups("tp"), "of another mesh")
    assert other is not None and other.ranks == (4, 5) and other.axis_sizes == {}


def test_the_mesh_as_types_see_it_has_the_parts_of_tp_that_are_in_use() -> None:
    here = Context(mesh := Mesh(8, tp=8), 3, SHAPES)
    assert here.typed_mesh is mesh
    here.communicator(("tp", "pp")), here.communicator("tp")
    assert here.typed_mesh is mesh
    here.communicator("tp%4")
    assert here.typed_mesh == Mesh(8, tp=8, tp_replicas=4) and here.mesh is mesh


def test_the_innermost_context_of_a_thread_and_else_that_of_the_process() -> None:
    one, two = Context(MESH, 1, SHAPES), Context(MESH, 2, SHAPES)
    assert not context.is_initialized() and context.default() is None
    with context.use(one) as entered:
        assert entered is one is context.current() and context.is_initialized() and context.default() is None
        with pytest.raises(ZeroDivisionError), context.use(two):
            assert context.current() is two
            raise ZeroDivisionError
        assert context.current() is one
        others: list[bool] = []
        thread = threading.Thread(target=lambda: others.append(context.is_initialized()))
        thread.start()
        thread.join()
        assert others == [False]
    context.set_default(two)
    try:
        assert context.is_initialized() and context.current() is two is context.default()
        with context.use(one):
            assert context.current() is one
        assert comm.communicator("tp") is two.communicator("tp")
    finally:
        context.set_default(None)
    assert not context.is_initialized()


def test_where_ranks_are_threads_each_asks_who_it_is() -> None:
    rank = [1]
    contexts = {number: Context(MESH, number, SHAPES) for number in (1, 2)}
    try:
        for new, here in contexts.items():
            rank[0] = new
            context.set_of_thread(here, lambda: rank[0])
        assert context.current() is contexts[2] is context.default()
        rank[0] = 1
        assert context.current() is contexts[1]
        rank[0] = 3
        assert not context.is_initialized()
    finally:
        for new in (*contexts, 3):
            rank[0] = new
            context.set_of_thread(None, lambda: rank[0])
    assert not context.is_initialized() and context._by_rank == {}


# --- records


def test_shapes_and_bytes_of_what_is_communicated() -> None:
    x, y = torch.ones(2, 3), torch.ones(4, dtype=torch.float64)
    group = SimpleNamespace(axis="tp", global_rank=3, size=2)
    assert recording.shape_of(x) == (2, 3) and recording.shape_of([x, y]) == (10,)
    with (
        recording.recorder(3, waits=True) as mine,
        recording.recorder(None, waits=False) as all_of_them,
        recording.recorder(2, waits=True) as others,
    ):
        recording.note(group, "all_reduce", x, op="max", dtype=torch.float64)
        recording.note(group, "all_gather", [y, x], scale=2)
        recording.note(group, "wait:all_gather", x)
        recording.note(group, "end:all_gather", x)
    first = recording.Call("all_reduce", "tp", "max", (2, 3), torch.float64, 48, 2)
    second = recording.Call("all_gather", "tp", None, (10,), torch.float64, 160, 2)
    wait = recording.Call("wait:all_gather", "tp", None, (2, 3), torch.float32, 0, 2)
    assert mine == [first, second, wait] and all_of_them == [first, second] and others == []
    assert recording.recorders == ()


# --- joining a job


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Functions of torch that `init_distributed` calls, replaced by ones that do nothing."""
    created: list[tuple[Any, ...]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: created.append((*args, options)))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: created.append(("device", device)))
    monkeypatch.delenv("RANK", raising=False)
    return created


@pytest.mark.parametrize("timeout, limit", [(None, c10d.DEFAULT_TIMEOUT), (7.5, datetime.timedelta(seconds=7.5))])
def test_a_job_of_one_or_of_torchrun(calls, monkeypatch, timeout, limit) -> None:
    assert launch.init_distributed("cpu", timeout) == torch.device("cpu")
    ((name, options),) = calls
    assert name == "gloo"
    assert (options["timeout"], options["rank"], options["world_size"]) == (limit, 0, 1)
    assert isinstance(options["store"], dist.HashStore)
    calls.clear()
    monkeypatch.setenv("RANK", "3")
    assert launch.init_distributed("auto", timeout) == torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert calls[0] == ("gloo", {"timeout": limit})
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    calls.clear()
    assert launch.init_distributed("cpu") == torch.device("cpu") and calls == []


def test_the_local_ranks_gpu(calls, monkeypatch) -> None:
    with pytest.raises(ValueError) as error:
        launch.init_distributed("cuda")
    assert str(error.value) == "device cuda was requested, but torch.cuda.is_available() is False; use device cpu"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("RANK", "6")
    for local, device in ((None, "cuda:0"), ("2", "cuda:2")):
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", local)
        assert launch.init_distributed() == torch.device(device)
        assert calls == [("device", torch.device(device)), ("nccl", {"timeout": c10d.DEFAULT_TIMEOUT})]
        calls.clear()


def test_xla_without_torch_xla(monkeypatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None if name == "torch_xla" else 1 / 0)
    with pytest.raises(ValueError) as error:
        launch.init_distributed("xla")
    assert str(error.value) == (
        "device 'xla' needs torch_xla, which is not installed: pip install torch==2.9.0 torch_xla==2.9.0"
    )


@pytest.mark.parametrize(
    "backend, failed, ends", [("gloo", False, True), ("nccl", False, False), ("gloo", True, False)]
)
def test_gloo_is_ended_after_a_script_that_has_not_failed(monkeypatch, backend, failed, ends) -> None:
    destroyed: list[int] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append(1))
    monkeypatch.delattr(sys, "last_value", raising=False)
    if failed:
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    context.set_default(Context(MESH, 0, SHAPES))
    try:
        launch._end_gloo()
        assert (context.default() is None) == ends
    finally:
        context.set_default(None)
    assert bool(destroyed) == ends


class Failing(Counting):
    monitor = None

    def communicator(self, label: str, *args: Any, **options: Any) -> Any:
        if len(self.made) == 3:
            raise RuntimeError("no network")
        return super().communicator(label, *args, **options)


def test_a_mesh_is_connected_with_the_groups_of_a_step_in_one_order(monkeypatch) -> None:
    backend, stopped = Counting(), []
    backend.close = lambda: stopped.append("closed")  # type: ignore[method-assign]
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    asked: list[float | None] = []
    monkeypatch.setattr(launch.backends.torch_job, "connect", lambda timeout: asked.append(timeout) or backend)
    launch.connect(MESH, timeout=3.0)
    assert comm.current().rank == 5 and comm.current().backend is backend and asked == [3.0]
    axes = ["tp", "pp", "dp", "cp", "dp,cp", "pp,tp", "ep", "edp", "world"]
    assert [label for label, *_ in backend.made] == axes
    launch.disconnect()
    launch.disconnect()
    assert stopped == ["closed"] and not comm.is_initialized()
    backend.made.clear()
    launch.connect(MESH, lazy=True)
    assert backend.made == [] and asked == [3.0, None]
    launch.disconnect()
    failing = Failing()
    failing.monitor = SimpleNamespace(stop=lambda: stopped.append("watch"))  # type: ignore[assignment]
    monkeypatch.setattr(launch.backends.torch_job, "connect", lambda timeout: failing)
    with pytest.raises(RuntimeError, match="no network"):
        launch.connect(MESH)
    assert stopped[-1] == "watch" and not comm.is_initialized()
    failing.monitor = None
    with pytest.raises(RuntimeError, match="no network"):
        launch.connect(MESH)


# --- random numbers of a device


class Generator:
    device_type = "xla"

    def __init__(self) -> None:
        self.state = torch.tensor([5])

    def get_state(self) -> torch.Tensor:
        return self.state

    def set_state(self, state: torch.Tensor) -> None:
        self.state = state


def test_states_are_of_the_cpu_and_of_the_device() -> None:
    with comm.as_rank(MESH, 0, backend := shapes.ShapesBackend()):
        assert not generators.device_has_own_program() and len(generators.get_state()) == 1
        generators.seed(3)
        first = torch.rand(2)
        backend.generator = generator = Generator()
        assert generators.device_has_own_program()
        generators.seed(3)
        assert generator.state.tolist() == [3] and torch.equal(torch.rand(2), first)
        state = generators.get_state()
        assert torch.equal(state[0], torch.get_rng_state()) and state[1] is generator.state
        before = torch.rand(2)
        generator.state = torch.tensor([9])
        generators.set_state(state)
        assert generator.state.tolist() == [3] and torch.equal(torch.rand(2), before)
    assert not generators.device_has_own_program()


def test_the_state_of_a_gpu_in_use(monkeypatch) -> None:
    messages: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([1, 2], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", messages.append)
    state = generators.get_state()
    assert len(state) == 2 and state[1].tolist() == [1, 2]
    generators.set_state(state)
    generators.set_state(state[:1])
    assert len(messages) == 1 and messages[0] is state[1]

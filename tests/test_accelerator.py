"""`neuronx_dist.accelerator`: which functions of a device's module are called, on a module that records its calls."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import accelerator
from neuronx_dist.accelerator import machine, random_numbers, streams
from neuronx_dist.comm import generators

NAME = "privateuseone"  # the name of torch's device type for devices outside torch, until one of them renames it


class Device(ModuleType):
    """The module of a device type, with the functions that TorchNeuron or another package registers."""

    def __init__(self) -> None:
        super().__init__(f"torch.{NAME}")
        self.calls: list[str] = []
        self.state = torch.tensor([1, 2], dtype=torch.uint8)
        self.started = True

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self.started

    def device_count(self) -> int:
        self.calls.append("device_count")
        return 2

    def current_device(self) -> int:
        self.calls.append("current_device")
        return 1

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def get_rng_state(self) -> torch.Tensor:
        self.calls.append("get_rng_state")
        return self.state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.calls.append("set_rng_state")
        self.state = state


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A machine whose accelerator is a device outside torch."""
    module = Device()
    monkeypatch.setattr(torch, NAME, module, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(NAME))
    return module


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.delattr(Device, name)


def test_the_accelerator_of_this_machine(device: Device) -> None:
    assert accelerator.current_type() == NAME
    assert accelerator.module_of(NAME) is device
    assert device.calls == []  # nothing that starts a runtime


def test_a_machine_without_accelerator(no_accelerator: None) -> None:
    assert accelerator.current_type() is None and accelerator.in_use() is None
    assert accelerator.random_state() is None
    accelerator.set_random_state(torch.zeros(1))
    assert not accelerator.pins_memory()


def test_a_build_for_an_accelerator_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert accelerator.current_type() is None and not accelerator.pins_memory()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert accelerator.current_type() == "cuda" and accelerator.pins_memory()


def test_modules_and_current_devices(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.module_of("xla") is None and accelerator.module_of("meta") is None
    assert accelerator.current_device("cpu") == torch.device("cpu")
    assert accelerator.current_device("xla") == torch.device("xla")
    assert accelerator.current_device(NAME) == torch.device(NAME, 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert accelerator.current_device("cuda") == torch.device("cuda", 3)
    without(monkeypatch, "current_device")
    assert accelerator.current_device(NAME) == torch.device(NAME)
    assert accelerator.in_torch("cuda") and accelerator.in_torch("cpu") and not accelerator.in_torch(NAME)


def test_random_states_are_the_devices(device: Device) -> None:
    state = generators.get_state()
    assert len(state) == 2 and state[1] is device.state and device.calls == ["get_rng_state"]
    device.state = torch.tensor([9], dtype=torch.uint8)
    generators.set_state(state)
    assert device.state is state[1] and device.calls[1:] == ["set_rng_state"]
    generators.set_state(state[:1])
    assert len(device.calls) == 2
    device.started = False
    assert len(generators.get_state()) == 1 and len(device.calls) == 2


def test_a_device_without_generator_warns_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "get_rng_state", "set_rng_state")
    random_numbers._warn_of_state.cache_clear()
    with pytest.warns(UserWarning, match=f"torch.{NAME} has no get_rng_state.*redraws other ones"):
        assert len(generators.get_state()) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(generators.get_state()) == 1
        generators.set_state([torch.get_rng_state(), torch.zeros(1)])


@pytest.mark.parametrize(
    "joined, types, used", [(False, [NAME], False), (True, [NAME], True), (True, ["cpu"], False), (True, [], True)]
)
def test_a_device_that_does_not_say_whether_it_is_in_use(
    device: Device, monkeypatch: pytest.MonkeyPatch, joined: bool, types: list[str], used: bool
) -> None:
    """The runtime of TorchNeuron may not be used before `init_process_group`."""
    without(monkeypatch, "is_initialized")
    monkeypatch.setattr(dist, "is_initialized", lambda: joined)
    monkeypatch.setattr(machine, "default_group", object)
    monkeypatch.setattr(dist, "get_backend", lambda: "imitated" if types == [] else "other")
    monkeypatch.setitem(dist.Backend.default_device_backend_map, NAME, "imitated")
    monkeypatch.setattr(machine, "device_types", lambda group: [torch.device(name) for name in types])
    assert accelerator.in_use() == (NAME if used else None)
    assert len(generators.get_state()) == 1 + used
    assert device.calls == ["get_rng_state"] * used


def test_random_states_are_restored(device: Device) -> None:
    before, first = torch.get_rng_state(), device.state
    with accelerator.random_state_restored():
        torch.rand(3)
        device.state = torch.tensor([9], dtype=torch.uint8)
    assert torch.equal(torch.get_rng_state(), before) and device.state is first
    with pytest.raises(KeyError), accelerator.random_state_restored():
        device.state = torch.tensor([9], dtype=torch.uint8)
        raise KeyError
    assert device.state is first


def test_all_gpus_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    forked: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: forked.append([*devices]) or nullcontext())
    with accelerator.random_state_restored():
        pass
    assert forked == [[0, 1, 2]]


def test_streams(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.has_streams("cuda") and not accelerator.has_streams("cpu") and not accelerator.has_streams("xla")
    assert not accelerator.has_streams(NAME) and not accelerator.is_copied_aside(NAME)
    assert accelerator.is_copied_aside("cpu") and accelerator.is_copied_aside("cuda")
    for name in ("Event", "Stream", "current_stream", "stream"):
        monkeypatch.setattr(Device, name, object, raising=False)
    assert accelerator.has_streams(NAME) and accelerator.is_copied_aside(NAME)


def test_waiting(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu", "xla", "meta"):
        accelerator.synchronize(name)
    accelerator.synchronize(NAME)
    assert device.calls == ["synchronize"]
    without(monkeypatch, "synchronize")
    accelerator.synchronize(NAME)


def test_timing_events(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert accelerator.timing_event("cpu") is None and accelerator.timing_event(NAME) is None
    monkeypatch.setattr(Device, "Event", staticmethod(lambda enable_timing: ("event", enable_timing)), raising=False)
    assert accelerator.timing_event(NAME) == ("event", True)
    monkeypatch.setattr(Device, "Event", object)  # takes no enable_timing
    assert accelerator.timing_event(NAME) is None


def test_pinned_memory(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[bool] = []

    class Pinned:
        def is_pinned(self) -> bool:
            return True

    def empty(*_: Any, pin_memory: bool) -> Any:
        pinned.append(pin_memory)
        return Pinned()

    def refuse(*_: Any, pin_memory: bool) -> Any:
        raise RuntimeError("this device pins nothing")

    monkeypatch.setattr(torch, "empty", empty)
    streams._pins.cache_clear()
    device.started = False
    assert not accelerator.pins_memory() and pinned == []  # a job on the CPU does not start the runtime
    device.started = True
    assert accelerator.pins_memory() and accelerator.pins_memory() and pinned == [True]
    streams._pins.cache_clear()
    monkeypatch.setattr(torch, "empty", refuse)
    assert not accelerator.pins_memory()
    streams._pins.cache_clear()


def test_sums_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not accelerator.autocast_sums_stay_wide("meta")
    with torch.autocast("cpu"):
        assert not accelerator.autocast_sums_stay_wide("cpu")
        assert not accelerator.autocast_sums_stay_wide("cuda")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: True)
    assert accelerator.autocast_sums_stay_wide("cuda")
    asked: list[str] = []
    monkeypatch.setattr(machine, "_sums_are_wide", lambda device_type: asked.append(device_type) or False)
    assert not accelerator.autocast_sums_stay_wide(NAME) and asked == [NAME]


def test_the_probe_of_sums_on_the_cpu() -> None:
    assert machine._sums_are_wide.__wrapped__("cpu") is False  # torch.autocast("cpu") leaves sums in bfloat16


def test_numbers() -> None:
    assert [accelerator.has_double(name) for name in ("cpu", "cuda", "meta", "xla", NAME)] == [True] * 3 + [False] * 2
    assert [accelerator.updates_lists(name) for name in ("cpu", "cuda", "xpu", "mps", "xla")] == [
        False,
        True,
        True,
        False,
        False,
    ]

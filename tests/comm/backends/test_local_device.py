"""Joining a job on any device: which calls of torch are made, in which order, and what is refused."""

from __future__ import annotations

import os
import re
import socket
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuronx_dist.comm import launch
from neuronx_dist.comm.backends import c10d, local_device

NAME = "privateuseone"


class Machine:
    """A machine whose accelerator is outside torch, with a log of the calls that start its runtime."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int = 2, current: int = 0) -> None:
        self.calls: list[Any] = []
        self.current = current
        module: Any = ModuleType(f"torch.{NAME}")
        module.is_available = lambda: True
        module.device_count = lambda: self.calls.append("device_count") or count
        module.current_device = lambda: self.calls.append("current_device") or self.current
        module.set_device = lambda device: self.calls.append(("set_device", device))
        monkeypatch.setattr(torch, NAME, module, raising=False)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(NAME))
        monkeypatch.setitem(dist.Backend.default_device_backend_map, NAME, "imitated")
        monkeypatch.setattr(dist, "init_process_group", lambda name, **options: self.calls.append(("init", name)))
        monkeypatch.setattr(dist, "get_world_size", lambda: 1)
        monkeypatch.setenv("RANK", "1")
        self.module = module


@pytest.mark.parametrize("name", ["auto", NAME])
def test_a_device_outside_torch_is_not_used_before_the_process_group(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch.init_distributed(name) == torch.device(NAME, 1)
    chosen = ("set_device", torch.device(NAME, 1))
    assert machine.calls == [("init", "imitated"), "current_device", "device_count", chosen]


def test_a_device_that_the_backend_chose_is_not_chosen_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runtime with one device per process may count one device, whose index is LOCAL_RANK."""
    machine = Machine(monkeypatch, count=1, current=3)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert launch.init_distributed() == torch.device(NAME, 3)
    assert machine.calls == [("init", "imitated"), "current_device"]


def test_a_device_module_with_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    for name in ("device_count", "current_device", "set_device"):
        delattr(machine.module, name)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch.init_distributed() == torch.device(NAME, 1) and machine.calls == [("init", "imitated")]


def test_auto_without_accelerator_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert local_device.device_type("auto") == "cpu" and local_device.backend_of("cpu") == "gloo"
    assert local_device.backend_of("cuda") == "nccl"
    assert local_device.select("cpu") == torch.device("cpu") and local_device.select("xla") == torch.device("xla")


def refused(call: Any, *args: Any) -> str:
    with pytest.raises(ValueError) as error:
        call(*args)
    return str(error.value)


def test_an_unknown_device(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    message = refused(launch.init_distributed, "gpu")
    assert message.startswith(
        f"device 'gpu' is unknown to torch {torch.__version__}: use one that this machine has (cpu"
    )
    assert NAME in message and not dist.is_initialized()


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(local_device.importlib.util, "find_spec", lambda name: None)
    assert local_device.types_of_machine() == ["cpu"]
    monkeypatch.setattr(local_device.importlib.util, "find_spec", str)
    assert local_device.types_of_machine() == ["cpu", "xla"]
    message = refused(launch.init_distributed, "cuda:1")
    assert message.startswith(
        "device 'cuda:1' has an index: pass 'cuda'; the index is the environment variable LOCAL_RANK"
    )
    assert "this machine has (cpu, xla), or import the package" in refused(launch.init_distributed, "gpu")
    assert "install torch-neuronx (TorchNeuron)" in refused(launch.init_distributed, "neuron")
    assert "install torch_tpu" in refused(launch.init_distributed, "tpu:0")


def test_a_device_that_this_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    message = refused(launch.init_distributed, "xpu")
    assert message.startswith(
        "device xpu was requested, but torch.xpu.is_available() is False; use device cpu or " + NAME
    )


@pytest.mark.parametrize("name", [NAME, "meta"])
def test_a_device_without_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = Machine(monkeypatch)
    monkeypatch.delitem(dist.Backend.default_device_backend_map, NAME)
    message = refused(launch.init_distributed, name)
    assert message.startswith(f"device {name!r} has no backend of torch.distributed; devices with one: cpu (gloo), ")
    assert f"register_backend(..., devices=[{name!r}])" in message and "or use device 'cpu'" in message
    assert machine.calls == []


@pytest.mark.parametrize("count, devices", [(2, "2 {0} devices"), (1, "1 {0} device")])
def test_a_local_rank_beyond_the_devices(monkeypatch: pytest.MonkeyPatch, count: int, devices: str) -> None:
    Machine(monkeypatch, count)
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("MADE_UP_VISIBLE_CORES", "0-1")
    message = refused(launch.init_distributed)
    assert message.startswith(f"LOCAL_RANK is 2, but this process sees {devices.format(NAME)}: start at most {count} ")
    assert f"--nproc-per-node {count}" in message and "MADE_UP_VISIBLE_CORES=0-1" in message


def test_a_local_rank_beyond_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "4")
    assert "LOCAL_RANK is 4, but this process sees 4 cuda devices" in refused(launch.init_distributed, "cuda")
    assert not dist.is_initialized()  # it is refused before the job is joined
    monkeypatch.setenv("LOCAL_RANK", "first")
    assert "LOCAL_RANK is 'first'" in refused(launch.init_distributed, "cuda")


# --- two processes on one device


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A job of two ranks with a store; `job(rank, pid)` makes this process one of them."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(local_device, "default_store", lambda: store)

    def become(rank: int, pid: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(os, "getpid", lambda: pid)

    return become


def test_two_processes_on_one_device(job: Any) -> None:
    job(0, 100)
    local_device.claim(torch.device(NAME, 0))
    local_device.claim(torch.device(NAME, 0))  # the same process joins again
    job(1, 101)
    local_device.claim(torch.device(NAME, 1))
    message = refused(local_device.claim, torch.device(NAME, 0))
    host = re.escape(socket.gethostname())
    assert re.match(rf"ranks 0 \(process 100\) and 1 \(process 101\) on host {host} both use {NAME}:0, which", message)
    assert "LOCAL_RANK" in message and "torchrun" in message


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "mps:0"])
def test_devices_that_processes_may_share(job: Any, device: str) -> None:
    for rank in range(2):
        job(rank, 100 + rank)
        local_device.claim(torch.device(device))


@pytest.mark.parametrize("what", ["host", "visible devices"])
def test_other_devices_of_the_same_index(job: Any, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    for rank in range(2):
        job(rank, 100)
        if what == "host":
            monkeypatch.setattr(socket, "gethostname", ["first", "second"][rank].__str__)
        else:
            monkeypatch.setenv("MADE_UP_VISIBLE_CORES", str(rank))
        local_device.claim(torch.device(NAME, 0))


def test_a_store_that_holds_nothing(job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("not implemented")

    job(0, 100)
    monkeypatch.setattr(local_device, "default_store", Store)
    local_device.claim(torch.device(NAME, 0))


def test_the_timeout_is_the_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch)
    limits: list[Any] = []
    monkeypatch.setattr(dist, "init_process_group", lambda name, **options: limits.append(options["timeout"]))
    launch.init_distributed()
    launch.init_distributed(timeout=3)
    assert limits[0] == c10d.DEFAULT_TIMEOUT and limits[1].total_seconds() == 3

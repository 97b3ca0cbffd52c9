"""`neuronx-dist doctor`: its findings, with what they say to do, its exit code, and its time limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from neuronx_dist import __main__ as command
from neuronx_dist.comm.doctor import command as doctor
from neuronx_dist.comm.doctor import machine, network, pair, probe
from neuronx_dist.comm.doctor.findings import Finding, text_of
from tests.support.paths import ROOT
from tests.support.pool import processes


def by_subject(findings: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


# --- the command


@pytest.mark.process
def test_two_processes_on_this_machine() -> None:
    words = [sys.executable, "-m", "neuronx_dist", "doctor", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] is True and report["findings"][0]["subject"] == "python"
    probed = {
        f["subject"]: f["status"] for f in report["findings"] if f["subject"].startswith("two processes on cpu: ")
    }
    assert probed == {f"two processes on cpu: {name}": "ok" for name in probe.CALLS}


@pytest.mark.process
def test_a_wrong_interface(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert command.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (named,) = [
        line for line in lines if line.startswith("failed   GLOO_SOCKET_IFNAME: nowhere0: no interface nowhere0")
    ]
    assert "set it to one of lo" in named
    (failed,) = [line for line in lines if line.startswith("failed   two processes on cpu: all_reduce: RuntimeError")]
    assert "nowhere0" in failed and failed.endswith("; look at the lines above")
    others = (
        "all_reduce of bfloat16, all_reduce of int64, asynchronous all_reduce, all_gather, reduce_scatter, "
        "send and recv, all_to_all of unequal parts, barrier of a sub-group"
    )
    assert lines[-1].startswith(f"missing  two processes on cpu: other calls: not tried: {others}")


@pytest.mark.process
def test_an_unknown_device(capsys: Any) -> None:
    assert doctor.run(doctor.arguments().parse_args(["--device", "gpu"])) == 1
    assert "two processes on gpu: all_reduce: ValueError: device 'gpu' is unknown to torch" in capsys.readouterr().out


def test_one_gpu_is_not_tried_by_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_run", lambda *_: 1 / 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (finding,) = pair.findings("cuda", 5.0)
    assert finding.status == "missing" and "this machine has one cuda device" in finding.detail


def test_without_processes(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(pair, "findings", lambda *_: 1 / 0)
    assert command.main(["doctor", "--no-probe"]) == 0
    assert capsys.readouterr().out.startswith("ok       python: ")


@pytest.mark.parametrize("subject, code", [("two processes on cpu: all_reduce", 1), ("two processes on cpu: recv", 0)])
def test_the_exit_code_is_that_of_the_all_reduce(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, subject: str, code: int
) -> None:
    monkeypatch.setattr(pair, "findings", lambda *_: [Finding("failed", subject, "broken", "mend it")])
    assert command.main(["doctor"]) == code
    assert capsys.readouterr().out.endswith(f"failed   {subject}: broken; mend it\n")
    assert command.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is not bool(code)
    assert report["findings"][-1] == {"status": "failed", "subject": subject, "detail": "broken", "remedy": "mend it"}


def test_lines() -> None:
    assert text_of(Finding("ok", "torch", "2.13")) == "ok       torch: 2.13"
    assert text_of(Finding("missing", "s3fs", "none", "install it")) == "missing  s3fs: none; install it"


# --- two processes


def pair_of(monkeypatch: pytest.MonkeyPatch, *scripts: str) -> list[dict[str, str]]:
    """Replaces the program of each rank; returns the environments that processes are started with."""
    environments: list[dict[str, str]] = []
    start = subprocess.Popen

    def started(words: list[str], *, env: dict[str, str], **options: Any) -> Any:
        environments.append(env)
        return start([sys.executable, "-S", "-c", scripts[int(env["RANK"])]], env=env, **options)

    monkeypatch.setattr(pair.subprocess, "Popen", started)
    return environments


def said(*answers: tuple[str, str | None]) -> str:
    return "".join(f"print({json.dumps(list(answer))!r}, flush=True)\n" for answer in answers)


JOINED = ("init_process_group", "")


@pytest.mark.process
def test_processes_that_hang_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    hangs = said(JOINED, ("all_reduce", None)) + "import time; time.sleep(600)"
    environments = pair_of(monkeypatch, hangs, hangs)
    found = pair.findings("cpu", 1.5)
    assert found[0] == Finding(
        "failed", "two processes on cpu: all_reduce", "no answer within 2 s", "look at the lines above"
    )
    assert found[1].detail.startswith("not tried: all_reduce of bfloat16, ") and len(found) == 2
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in environments] == [
        ("0",) * 2 + ("2",),
        ("1",) * 2 + ("2",),
    ]


@pytest.mark.process
def test_an_error_on_one_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    works = said(JOINED, *((name, "") for name in probe.CALLS))
    fails = said(JOINED, *((name, "wrong result" if name == "send and recv" else "") for name in probe.CALLS))
    pair_of(monkeypatch, works, "print('[a warning of a library')\n" + fails)
    found = by_subject(pair.findings("cpu", 30))
    assert found.pop("two processes on cpu: send and recv")[0::2] == ("failed", "wrong result")
    assert {finding.status for finding in found.values()} == {"ok"} and len(found) == len(probe.CALLS) - 1


def outcomes() -> dict[str, str]:
    return {name: probe.error_of(name, torch.device("cpu")) for name in probe.CALLS}


@pytest.mark.process
def test_calls_that_this_package_replaces_are_no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = processes(2).run(outcomes, initialize=False, backend="neuron without allreduce")
    works = {"all_gather"}
    assert {name for name, error in found.items() if not error} == works
    assert all(error.startswith(probe.REPLACED) for name, error in found.items() if name not in works), found
    pair_of(monkeypatch, *[said(JOINED, *found.items())] * 2)
    shown = by_subject(pair.findings("neuron", 30))["two processes on neuron: send and recv"]
    assert shown.status == "missing" and "ProcessGroupNeuron has no send; other calls replace it" in text_of(shown)
    found, _ = processes(2).run(outcomes, initialize=False, backend="neuron without allgather _allgather_base")
    assert found["all_gather"] == "NotImplementedError: ProcessGroupNeuron has no allgather"


@pytest.mark.process
def test_a_network_that_works_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    checks = "import os\nassert 'GLOO_SOCKET_IFNAME' in os.environ, 'no route'\n"
    script = said(JOINED) + checks + said(("all_reduce", ""))
    environments = pair_of(monkeypatch, script, script)
    found = by_subject(pair.findings("cpu", 60))
    assert len(environments) == 4 and environments[2]["GLOO_SOCKET_IFNAME"].startswith("lo")
    failed = found["two processes on cpu: all_reduce"]
    assert failed.status == "failed" and failed.detail == "AssertionError: no route"
    assert failed.remedy.startswith("it works with GLOO_SOCKET_IFNAME=lo: set GLOO_SOCKET_IFNAME to the interface")


def test_what_a_process_printed() -> None:
    out = '["init_process_group", null]\nnoise\n["init_process_group", ""]\n["all_reduce", null]\n'
    errors = pair._errors(out, "Traceback\n  RuntimeError: no route\n\n", "")
    assert errors["init_process_group"] == "" and errors["all_reduce"] == "RuntimeError: no route"
    assert errors["all_gather"] is None
    assert pair._errors("", "", "")["all_reduce"] == "the process ended without an answer"
    assert pair._errors("", "x", "no answer within 3 s")["init_process_group"] == "no answer within 3 s"
    assert [pair._worse(*both) for both in (("", ""), ("", None), ("e", None), (None, "f"))] == ["", None, "e", "f"]


# --- this machine


@pytest.mark.parametrize(
    "version, status, words",
    [
        ("2.13.1+cu130", "ok", "the tests ran on 2.9, 2.13"),
        ("2.99.0", "missing", "on which no tests ran"),
        ("2.8.0", "failed", "older than 2.9; pip install 'torch>=2.9'"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, status: str, words: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    finding = by_subject(machine.versions())["torch"]
    assert finding.status == status and words in text_of(finding)


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None if name == "torch_xla" else name)
    found = by_subject(machine.packages())
    assert (
        found["torch_xla"].status == "missing"
        and "pip install torch==2.9.0 torch_xla==2.9.0" in found["torch_xla"].remedy
    )
    assert found["safetensors"].status == "ok"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert by_subject(machine.devices())["accelerator"].status == "missing"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch.cuda.is_available() is False" in by_subject(machine.devices())["device cuda"].detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert by_subject(machine.devices())["device cuda"].detail.startswith("8 visible")


def test_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    found = by_subject(machine.backends())
    for name in ("gloo", "nccl", "xccl", "ucc", "mpi"):
        assert (f"backend {name}" in found) == getattr(dist, f"is_{name}_available")()
    monkeypatch.setitem(machine._AVAILABLE, "nccl", lambda: True)
    monkeypatch.setitem(machine._AVAILABLE, "mpi", lambda: False)
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "imitated"])
    found = by_subject(machine.backends())
    assert found["backend nccl"].detail == "default for cuda" and "backend mpi" not in found
    assert found["backend imitated"].detail == "default for no device"
    monkeypatch.setattr(machine.accelerator, "current_type", lambda: "imitated")
    monkeypatch.setattr(machine.local_device, "backend_of", lambda name: (_ for _ in ()).throw(ValueError("none")))
    assert by_subject(machine.backends())["backend for imitated"].status == "failed"


@pytest.mark.parametrize("blocks, status", [(1 << 10, "missing"), (1 << 20, "ok"), (None, "missing")])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, blocks: int | None, status: str) -> None:
    def size(path: str) -> Any:
        if blocks is None:
            raise OSError
        return os.statvfs_result((4096, 4096, blocks, blocks, blocks, 0, 0, 0, 0, 0))

    monkeypatch.setattr(os, "statvfs", size)
    (finding,) = machine.shared_memory()
    assert finding.status == status and bool(finding.remedy) == (status == "missing")


@pytest.mark.parametrize("value, status", [(None, "missing"), ("2", "ok"), ("9", "missing"), ("many", "missing")])
def test_threads(monkeypatch: pytest.MonkeyPatch, value: str | None, status: str) -> None:
    monkeypatch.setattr(machine, "_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    (finding,) = machine.threads()
    assert finding.status == status and ("export OMP_NUM_THREADS=4 divided" in finding.remedy) == (status == "missing")


# --- the network


def test_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = network.loopback()
    assert finding.status == "ok" and finding.detail.startswith("127.0.0.1, port ")

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError("refused")

    monkeypatch.setattr(socket, "create_connection", refuse)
    (finding,) = network.loopback()
    assert finding.status == "failed" and "127.0.0.1 cannot be reached: refused" in finding.detail


def test_the_port_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(network, "_PORT", other.getsockname()[1])
        (finding,) = network.port()
        assert finding.status == "missing" and "--master-port" in finding.remedy
    (finding,) = network.port()
    assert finding.status == "ok"


def test_the_name_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    (finding,) = network.host_name()
    assert finding.status == "ok" and finding.detail.endswith(" is 10.0.0.7")
    answered = threading.Event()
    monkeypatch.setattr(network, "_SECONDS", 0.05)
    monkeypatch.setattr(
        socket, "gethostbyname", lambda name: answered.wait(60) and "10.0.0.7"
    )  # a name server is silent
    (finding,) = network.host_name()
    answered.set()
    assert finding.status == "missing" and "/etc/hosts" in finding.remedy
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", socket.if_nameindex()[0][1])
    (finding,) = network.host_name()
    assert finding.status == "ok" and finding.subject == "GLOO_SOCKET_IFNAME"

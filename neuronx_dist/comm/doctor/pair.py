"""Two local processes that probe a device's backend, within a time limit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ... import accelerator
from . import probe
from .findings import Finding

__all__ = ["ALL_REDUCE", "findings"]

ALL_REDUCE = "all_reduce"
_JOIN = "init_process_group"
_INTERFACE = "GLOO_SOCKET_IFNAME"


def findings(device: str, seconds: float) -> list[Finding]:
    """Returns a finding for each call that two processes tried, the all-reduce first.

    If that fails, a second pair tries it over the loopback interface, which tells a wrong network from the rest.

    Args:
        device: a device type, as `init_distributed` takes it.
        seconds: after which the processes are ended.
    """
    subject = f"two processes on {device}"
    if _has_one(device):
        detail = f"not tried: this machine has one {device} device, and each process takes one"
        return [Finding("missing", f"{subject}: {ALL_REDUCE}", detail, "--device cpu tries gloo, which needs none")]
    begin = time.monotonic()
    results = _run(device, seconds / 2 if _may_try_again(device) else seconds, {})
    remedy = "look at the lines above"
    if results[ALL_REDUCE] and _may_try_again(device):
        again = _run(device, seconds - (time.monotonic() - begin), {_INTERFACE: _loopback()})
        if again[ALL_REDUCE] == "":
            remedy = f"it works with {_INTERFACE}={_loopback()}: set {_INTERFACE} to the interface that hosts share"
    found = [Finding("ok", f"{subject}: {name}", "works") for name, error in results.items() if error == ""]
    for name, error in results.items():
        if error and error.startswith(probe.REPLACED):
            text = error.removeprefix(probe.REPLACED)
            found.append(Finding("missing", f"{subject}: {name}", text, "other calls replace it: docs/devices.md"))
        elif error:
            found.append(Finding("failed", f"{subject}: {name}", error, remedy))
    not_tried = [name for name, error in results.items() if error is None]
    if not_tried:
        found.append(Finding("missing", f"{subject}: other calls", f"not tried: {', '.join(not_tried)}"))
    return found


def _has_one(device: str) -> bool:
    """Returns whether this machine has one device of a type, which one process takes."""
    takes_one = device not in ("cpu", "mps") and accelerator.in_torch(device)
    return takes_one and accelerator.module_of(device).device_count() == 1


def _may_try_again(device: str) -> bool:
    return device == "cpu" and _INTERFACE not in os.environ


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), "lo")


def _run(device: str, seconds: float, environment: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the error of each call, empty if it worked on both ranks; None: it was not tried."""
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{rank}.{kind}") for rank in range(2) for kind in ("out", "err")]
        files = [path.open("w") for path in outputs]
        port = _free_port()
        started = [_start(device, rank, port, environment, *files[2 * rank : 2 * rank + 2]) for rank in range(2)]
        try:
            while any(process.poll() is None for process in started) and time.monotonic() < deadline:
                time.sleep(0.05)
            in_time = all(process.poll() is not None for process in started)
        finally:
            for process in started:
                process.kill()
            for process in started:
                process.wait()
            for file in files:
                file.close()
        texts = [path.read_text(errors="replace") for path in outputs]
    late = "" if in_time else f"no answer within {seconds:.0f} s"
    ranks = [_errors(texts[2 * rank], texts[2 * rank + 1], late) for rank in range(2)]
    merged = {name: _worse(ranks[0][name], ranks[1][name]) for name in ranks[0]}
    joined = merged.pop(_JOIN)
    if joined:
        merged[ALL_REDUCE] = joined
    return merged


def _start(
    device: str, rank: int, port: int, environment: Mapping[str, str], out: IO[str], err: IO[str]
) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    paths = [path for path in (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")) if path]
    variables = {**os.environ, **environment, **{name: str(value) for name, value in place.items()}}
    variables |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", probe.__name__, device]
    return subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err)


def _errors(output: str, error_output: str, late: str) -> dict[str, str | None]:
    """Returns the error of each call by what one process printed, empty if it worked; None: it was not tried."""
    answers: dict[str, str | None] = {}
    for line in output.splitlines():
        try:
            name, error = json.loads(line)
        except (TypeError, ValueError):  # a line that some library printed
            continue
        answers[name] = error
    lines = [line.strip() for line in error_output.splitlines() if line.strip()]
    end = late or (lines[-1] if lines else "the process ended without an answer")
    answers = {_JOIN: None, ALL_REDUCE: None, **answers}  # these two are always tried
    hung = {name: end for name, error in answers.items() if error is None}
    return {name: hung.get(name, answers.get(name)) for name in (_JOIN, *probe.CALLS)}


def _worse(first: str | None, second: str | None) -> str | None:
    """Returns the error of either rank; without one, None if a rank did not try the call."""
    return first or second or (None if None in (first, second) else "")


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])

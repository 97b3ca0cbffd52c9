"""Python commands, each in a fork of one interpreter that has imported torch, transformers and this package.

    result = forked.run([script, "--steps", "4"], ranks=2)
    result.codes, result.outputs

A fork starts in milliseconds; a fresh interpreter needs 5 s of CPU until it has imported what a training script does.
The command runs as `python script ...` does: as `__main__`, with its arguments, folder, environment and exit code. At
its end threads are joined and `atexit` functions run; modules are not torn down, which takes a second of CPU.
With several ranks the forks have the environment variables that torchrun sets.
A test whose subject is a launcher, or what a fresh interpreter imports or frees, starts processes itself.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tests.support.paths import ROOT

__all__ = ["Result", "run", "run_to_the_end"]

PRELOADED = (
    "torch, neuronx_dist, neuronx_dist.hf, neuronx_dist.train.training_run, transformers.models.llama.modeling_llama, "
    "matplotlib.pyplot, fsspec"
)


class Result(NamedTuple):
    """Exit codes (128 + signal), standard output and standard error, by rank, and `time.time()` at the last end."""

    codes: list[int]
    outputs: list[str]
    errors: list[str]
    ended: float


def run(words: Sequence[str], ranks: int = 1, cwd: Path = ROOT, timeout: float = 240.0, **environment: str) -> Result:
    """Runs `python words...`: a script, `-c code` or `-m module`, and arguments; standard error apart from output.

    Raises:
        TimeoutError: after `timeout` seconds; the ranks are killed.
    """
    with tempfile.TemporaryDirectory(prefix="neuronx-dist-forked-") as folder:
        jobs = []
        common = {**_clean_environment(), **environment}
        if ranks > 1:
            common |= dict(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
            common |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        for rank in range(ranks):
            place = dict(RANK=str(rank), LOCAL_RANK=str(rank)) if ranks > 1 else {}
            files = [f"{folder}/{rank}.out", f"{folder}/{rank}.err"]
            jobs.append(dict(words=list(words), cwd=str(cwd), environment=common | place, files=files))
        codes = _interpreter().run(jobs, timeout)
        outputs, errors = ([Path(job["files"][k]).read_text() for job in jobs] for k in (0, 1))
        return Result(codes, outputs, errors, time.time())


def _clean_environment() -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    return environment


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class _Interpreter:
    """The process that forks, seen from the tests; it ends with them, since its standard input does."""

    def __init__(self) -> None:
        # -P: the folder of the tests is on nobody's path but by PYTHONPATH.
        code = f"import {PRELOADED}; from tests.support import forked; forked.preload_optional(); forked.serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            cwd=ROOT,
            env=_clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.process.kill)

    def run(self, jobs: list[dict[str, Any]], timeout: float) -> list[int]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([jobs, timeout]), file=self.process.stdin, flush=True)
        codes: list[int | None] = json.loads(self.process.stdout.readline())
        if None in codes:
            late = [number for number, code in enumerate(codes) if code is None]
            raise TimeoutError(f"ranks {late} of {jobs[0]['words']} did not end within {timeout:g} s")
        return [code for code in codes if code is not None]


@cache
def _interpreter() -> _Interpreter:
    return _Interpreter()


def preload_optional() -> None:
    """Imports what an environment may lack."""
    with suppress(ImportError):
        importlib.import_module("lightning.pytorch")


def serve() -> None:
    """Runs the commands that come on standard input."""
    gc.freeze()  # what was imported, half a million objects, is not searched by each collection of a command
    for line in sys.stdin:
        jobs, timeout = json.loads(line)
        children = []
        for job in jobs:
            if not (child := os.fork()):
                run_to_the_end(partial(_be, job))
            children.append(child)
        print(json.dumps(_codes(children, timeout)), flush=True)


def _codes(children: list[int], timeout: float) -> list[int | None]:
    """Exit codes of processes; None for a process that had to be killed after `timeout` seconds."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + timeout
    for child in children:
        descriptor = os.pidfd_open(child)
        ended, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        if not ended:
            os.kill(child, signal.SIGKILL)
        os.close(descriptor)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        codes[child] = (128 - status if status < 0 else status) if ended else None
    return [codes[child] for child in children]


def run_to_the_end(main: Callable[[], Any]) -> NoReturn:
    """Runs a program and ends this process with its exit code, as an interpreter does but for the modules' teardown."""
    code: Any = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _be(job: dict[str, Any]) -> None:
    """Runs the command in this process."""
    for target, path in enumerate((os.devnull, *job["files"])):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, target)
        os.close(opened)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    path = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry and entry not in sys.path]
    first, *others = job["words"]
    if first == "-c":
        sys.argv, sys.path[:0] = ["-c", *others[1:]], ["", *path]
        exec(compile(others[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv, sys.path[:0] = others, [job["cwd"], *path]
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = job["words"], [str(Path(first).parent), *path]
        runpy.run_path(first, run_name="__main__")

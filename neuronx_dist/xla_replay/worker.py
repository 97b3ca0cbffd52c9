"""A process that answers requests, one after the other: pickles over its standard input and output.

Lowering needs torch_xla and execution needs jaxlib; each has its XLA library, so each gets a separate process.
"""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

__all__ = ["Worker", "WorkerError", "serve"]


class WorkerError(RuntimeError):
    """Error: a request failed; the message has the worker's traceback."""


class Worker:
    """Runs a module's `main()` in a process with `environment` added to this process's, and sends it requests."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        self.module = module
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {module} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
        )

    def ask(self, request: Any, timeout: float = 600.0) -> Any:
        """Sends `request`, and returns the answer.

        Raises:
            WorkerError: the request raised, the worker died, or it did not answer within `timeout` seconds.
        """
        self.send(request)
        return self.receive(timeout)

    def send(self, request: Any) -> None:
        assert self._process.stdin is not None
        try:
            data = pickle.dumps(request)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"{error}: the replay runs in another process, so functions must be defined in importable modules, "
                "and arguments must be picklable"
            ) from error
        try:
            _write(self._process.stdin, data)
        except BrokenPipeError:
            raise self._died() from None

    def receive(self, timeout: float = 600.0) -> Any:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        if not ready:
            log = self._end_of_log()
            self.close()
            raise WorkerError(f"{self.module}: no answer within {timeout:g} s; its log ends:\n{log}")
        data = _read(self._process.stdout)
        if data is None:
            raise self._died()
        outcome, answer = pickle.loads(data)
        if outcome == "raised":
            error, text = answer
            if error is not None:
                error.__cause__ = WorkerError(text)
                raise error
            raise WorkerError(text)
        return answer

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """Ends the process, which this object started, and closes its pipes and its log."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # the process died before it read everything
            self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _died(self) -> WorkerError:
        code = self._process.wait()
        return WorkerError(f"{self.module} ended with exit code {code}; its log ends:\n{self._end_of_log()}")

    def _end_of_log(self, size: int = 4000) -> str:
        self._log.seek(0)
        return self._log.read()[-size:]


def serve(handle: Callable[[Any], Any]) -> None:
    """Runs the worker's side: answers requests until the other end closes; printed text goes to the log."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (data := _read(requests)) is not None:
        try:
            answer = ("done", handle(pickle.loads(data)))
            reply = pickle.dumps(answer)
        except BaseException as error:
            text = traceback.format_exc()
            try:
                reply = pickle.dumps(("raised", (pickle.loads(pickle.dumps(error)), text)))
            except Exception:
                reply = pickle.dumps(("raised", (None, text)))
        _write(answers, reply)


def _write(stream: BinaryIO | Any, data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _read(stream: BinaryIO | Any) -> bytes | None:
    head = stream.read(8)
    return stream.read(int.from_bytes(head, "little")) if len(head) == 8 else None

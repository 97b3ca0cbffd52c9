"""Worker processes for tests that need real ones: one pool for the whole session, torch imported once.

    results = processes(4).run(function, *args, mesh=dict(tp=2, pp=2))

runs `function(*args)` on 4 ranks, each a process with its own torch.distributed rank (gloo, loopback) and with
`initialize_model_parallel` done for that mesh, and gives what they return, by rank. The function is one that can be
imported (no closure, no lambda); arguments and results are pickled. Everything is bounded: a rank that raises, dies or
is stuck fails the test with its traceback, and the workers of that run are replaced. A run costs 0.04 s on 2
processes, 0.12 s on 4; the first one in a session starts the workers (2 s).
"""

from __future__ import annotations

import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["WorkerFailure", "processes", "shutdown"]

MAX_WORKERS = 4
TIMEOUT = 120.0  # seconds for one run
# The workers fork from a process that has imported what most of their tests use; a module that is missing is left out.
_PRELOADED = ["torch", "pytest", "neuronx_dist", "neuronx_dist.hf", "transformers.models.llama.modeling_llama"]
_PRELOADED += ["neuronx_dist.checking", "neuronx_dist.parallelize", "neuronx_dist.shard_tensor", "lightning.pytorch"]
_PRELOADED += ["neuronx_dist.hf.trainer", "datasets"]
_AFTERMATH = 1.0  # seconds the other ranks get to tell their own failure, after the first


class WorkerFailure(AssertionError):
    """A rank raised, died, or did not end in time. `.rank` is the first that did, `.kind` the name of its exception."""

    def __init__(self, message: str, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = kind


class _Worker:
    def __init__(self, number: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self.stacks = folder / f"stacks-{number}-{time.monotonic_ns()}"
        self.process = context.Process(target=_serve, args=(theirs, str(self.stacks)), daemon=True)
        self.process.start()
        theirs.close()

    def where(self) -> str:
        """The stacks of a worker that does not answer."""
        if self.process.is_alive() and self.process.pid is not None and self.stacks.exists():
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
            return self.stacks.read_text()
        return f"(the process has ended with exit code {self.process.exitcode})"

    def end(self, patience: float = 0.0) -> None:
        self.connection.close()
        self.process.join(patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(5)


class _Pool:
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="neuronx-dist-pool-")
        self.workers: list[_Worker] = []
        self.runs = 0

    def run(
        self,
        size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        mesh: dict[str, int] | None,
        timeout: float,
        backend: str,
    ) -> list[Any]:
        folder = Path(self.folder.name)
        while len(self.workers) < size:
            self.workers.append(_Worker(len(self.workers), folder))
        self.runs += 1
        store = folder / f"store-{self.runs}"
        payload = pickle.dumps((function, args))
        ranks: dict[Connection, int] = {}
        for rank, worker in enumerate(self.workers[:size]):
            worker.connection.send((payload, rank, size, str(store), mesh, timeout, backend))
            ranks[worker.connection] = rank
        results: list[Any] = [None] * size
        failures: list[tuple[int, str, str]] = []  # rank, kind, traceback
        deadline = time.monotonic() + timeout
        while ranks and time.monotonic() < deadline:
            for ready in wait(list(ranks), timeout=max(0.0, deadline - time.monotonic())):
                assert isinstance(ready, Connection)
                rank = ranks.pop(ready)
                try:
                    answer = pickle.loads(ready.recv_bytes())
                except EOFError:
                    process = self.workers[rank].process
                    process.join(1)
                    answer = ("dead", f"the process ended with exit code {process.exitcode}")
                if answer[0] == "result":
                    results[rank] = answer[1]
                else:
                    failures.append((rank, *answer))
                    deadline = min(deadline, time.monotonic() + _AFTERMATH)
        if not ranks and not failures:
            store.unlink(missing_ok=True)
            return results
        stuck = [] if failures else [(rank, "stuck", self.workers[rank].where()) for rank in sorted(ranks.values())]
        self._replace(size)
        told = failures or stuck
        text = "\n".join(f"--- rank {rank} of {size}: {kind}\n{trace}" for rank, kind, trace in told)
        name = getattr(function, "__qualname__", repr(function))
        if stuck:
            text = f"no answer within {timeout:g} s from ranks {[rank for rank, _, _ in stuck]}\n{text}"
        raise WorkerFailure(f"{name} on {size} processes, mesh {mesh}: {text}", told[0][0], told[0][1])

    def _replace(self, size: int) -> None:
        for worker in self.workers[:size]:
            worker.end()
        del self.workers[:size]

    def close(self) -> None:
        for worker in self.workers:
            worker.end(patience=2.0)
        self.workers.clear()
        self.folder.cleanup()


class Processes:
    """`size` workers of the session's pool."""

    def __init__(self, size: int) -> None:
        if not 1 <= size <= MAX_WORKERS:
            raise ValueError(f"the pool has 1 to {MAX_WORKERS} workers, not {size}")
        self.size = size

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        mesh: dict[str, int] | None = None,
        timeout: float = TIMEOUT,
        initialize: bool = True,
        backend: str = "gloo",
    ) -> list[Any]:
        """`function(*args)` on every rank; results by rank.

        Args:
            mesh: tp, pp, cp, ep; what is left is dp.
            timeout: seconds for all of it.
            backend: of the process group; another than gloo is one that `tests.support.devices.groups` imitates.
            initialize: False leaves `initialize_model_parallel` to the function.

        Raises:
            WorkerFailure: with the tracebacks of the ranks that failed, the first one first.
        """
        global _pool
        if _pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            _pool = _Pool()
        return _pool.run(self.size, function, args, (mesh or {}) if initialize else None, timeout, backend)


_pool: _Pool | None = None


def processes(size: int) -> Processes:
    return Processes(size)


def shutdown() -> None:
    """Ends the workers (at the end of the session)."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def _serve(connection: Connection, stacks: str) -> None:
    """A worker's life: take a task, be a rank, answer."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # the flight recorder of torch 2.15 asks a group in Python for its name
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what was imported, half a million objects, is not searched by each collection
    gc.set_threshold(20_000, 20, 20)  # as in the tests' process
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        while True:
            try:
                payload, *place = connection.recv()
            except EOFError:
                return
            try:
                answer = ("result", _be_rank(payload, *place))
                data = pickle.dumps(answer)
            except BaseException as error:  # noqa: B902 - whatever it was, the test is to see it
                data = pickle.dumps((type(error).__name__, traceback.format_exc()))
            connection.send_bytes(data)


def _be_rank(
    payload: bytes, rank: int, size: int, store: str, mesh: dict[str, int] | None, timeout: float, backend: str
) -> Any:
    import torch
    import torch.distributed as dist

    from neuronx_dist.parallel_layers.parallel_state import destroy_model_parallel, initialize_model_parallel
    from tests.support.devices.groups import imitate

    function, args = pickle.loads(payload)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    shared = dist.FileStore(store, size)
    dist.init_process_group(
        backend if backend == "gloo" else imitate(backend),
        store=shared,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    # After a failure nothing is taken down: the worker is replaced, and the others learn of it from the parent.
    if mesh is not None:
        names = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "ep": "expert_model"}
        initialize_model_parallel(**{f"{names[axis]}_parallel_size": count for axis, count in mesh.items()})
    result = function(*args)
    shared.set(f"done/{rank}", "")  # a rank that leaves closes connections which others may still be making
    shared.wait([f"done/{other}" for other in range(size)])
    destroy_model_parallel()
    if dist.is_initialized():  # else the function has left the job
        dist.destroy_process_group()
    return result

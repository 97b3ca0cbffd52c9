"""`neuronx-dist run --nproc-per-node 4 train.py`: torchrun that shows only the output of the ranks.

torchrun answers a rank's exit code with a traceback of 25 lines, which bury the message of the rank, and Ctrl-C with a
line for each process. Its options, environment variables and exit codes stay as they are. This command adds two
things: between several hosts it finds the network by the rendezvous (`run_network.py`), and ranks that have ended
because a flag is wrong are not started again. Below the output of the ranks is a line with the rank that failed first.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher

from . import run_network
from .health.failure import HANG
from .health.slow_waits import HANG_VARIABLE
from .local_store import local_tcp_store

__all__ = ["WRONG_USE", "arguments", "run"]

WRONG_USE = 2  # exit code of argparse for a wrong flag: ranks that are started again would fail in the same way
_LOGGERS = ("torch.distributed.run", "torch.distributed.elastic", "torch.distributed.launcher")


_EXAMPLES = """\
Runs a script on several processes, as torchrun does, and shows only the output of the script.

examples:

  $ neuronx-dist run --nproc-per-node 4 train.py --steps 10          # 4 ranks on this host
  $ neuronx-dist run --nproc-per-node gpu train.py                   # a rank for each GPU
  $ neuronx-dist run --standalone --max-restarts 3 --nproc-per-node 4 train.py    # started again after a failure
  $ neuronx-dist run --standalone --max-restarts 3 --hang-timeout 900 --nproc-per-node 4 train.py    # and after a hang

  on each of 2 hosts:
  $ neuronx-dist run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --nproc-per-node 4 train.py

The options are torchrun's:
"""


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of `run`: torchrun's options, a script, and the arguments of the script."""
    parser = torchrun.get_args_parser()
    parser.allow_abbrev = False  # a script's `--nproc` is none of the launcher's options
    parser.usage = "%(prog)s [options] script.py [arguments of the script]"
    parser.add_argument(
        "--hang-timeout",
        "--hang_timeout",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="ends the job, with the rank that is missing, where a rank waits for others for longer than this; must be "
        "longer than any wait that goes on: for a checkpoint, a download, a compilation (default: 0, never)",
    )
    parser.description, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    return parser


class _Agent(LocalElasticAgent):
    """Prints why ranks are restarted, and does not restart them where a restart would not help."""

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        """Starts the ranks; where they are ended, those that are stopped (SIGSTOP) run again, to receive SIGTERM."""
        pids: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close

        def continue_and_close(*args: Any, **options: Any) -> None:
            for pid in context.pids().values():
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
            close(*args, **options)

        context.close = continue_and_close
        return pids

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state != WorkerState.FAILED:
            return result
        rank, failure = _first(result.failures)
        if failure.exitcode == WRONG_USE:
            self._remaining_restarts = 0
        if self._remaining_restarts > 0:
            most = worker_group.spec.max_restarts
            count = f"restart {most - self._remaining_restarts + 1} of {most}"
            _say(f"{_end_of(rank, failure)}; restarting all ranks ({count})")
        return result


def run(args: argparse.Namespace) -> int:
    """Runs a script on several processes; the exit code is that of the rank that failed first, and 130 after Ctrl-C.

    The environment variable LOGLEVEL shows torchrun's own lines (LOGLEVEL=WARNING).
    """
    # Otherwise restarted ranks (`--max-restarts`) find the addresses of the dead ranks in the agent's store.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if "LOGLEVEL" not in os.environ:
        _silence_stores()
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    names = vars(launcher)
    if args is not None and args.hang_timeout:
        os.environ[HANG_VARIABLE] = str(args.hang_timeout)
    try:
        run_network.complete(args)
        names["LocalElasticAgent"] = _Agent
        with _local_stores():
            torchrun.run(args)
    except ChildFailedError as error:
        rank, failure = _first(error.failures)
        if failure.exitcode != WRONG_USE:  # a refusal of the script is the same for all ranks
            _say(_end_of(rank, failure))
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (RendezvousError, run_network.NetworkError) as error:
        _say(f"the hosts could not connect: {error}")
        return 1
    except SignalException as ended:
        return 128 + ended.sigval
    except KeyboardInterrupt:  # before torchrun has its handlers
        return 130
    finally:
        names["LocalElasticAgent"] = LocalElasticAgent
    return 0


@contextmanager
def _local_stores() -> Iterator[None]:
    """Makes torchrun's rendezvous of one host listen on this host alone."""
    modules = [vars(c10d_rendezvous_backend), vars(static_tcp_rendezvous)]
    before = [names["TCPStore"] for names in modules]
    for names in modules:
        names["TCPStore"] = local_tcp_store
    try:
        yield
    finally:
        for names, store in zip(modules, before):
            names["TCPStore"] = store


def _silence_stores() -> None:
    """Silences the C++ stacks that a process prints when it loses a store, with rank 0 or with its host."""
    if os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":  # for the ranks: torch has read it here
        with suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2


def _first(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Returns the rank that failed first, and its failure.

    The launcher has ended other ranks since, and ranks whose errors are consequences write no error file. Times are in
    whole seconds.
    """

    def order(item: tuple[int, Any]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        return failure.exitcode == -signal.SIGTERM, not os.path.isfile(failure.error_file), failure.timestamp, rank

    return min(failures.items(), key=order)


def _end_of(rank: int, failure: Any) -> str:
    code = failure.exitcode
    if code == HANG and os.path.isfile(failure.error_file):
        return str(failure.message)  # names the rank that is missing, not the one that waits for it
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    has_line = os.path.isfile(failure.error_file) and isinstance(failure.message, str)  # not of torch's `record`
    return f"rank {rank} {how}" + (f": {failure.message}" if has_line else "")


def _say(text: str) -> None:
    print(f"neuronx-dist run: {text}", file=sys.stderr, flush=True)

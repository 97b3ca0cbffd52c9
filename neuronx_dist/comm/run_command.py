"""`neuronx-dist run --nproc-per-node 4 train.py`: torchrun, of which only what the ranks say is seen.

torchrun answers the exit code of a rank with a traceback of its own, 25 lines that bury what the rank said, and Ctrl-C
with a line for each process. Its options, environment variables and exit codes stay as they are. In two things this
does more: between several hosts it finds the network by the rendezvous (`run_network.py`), and ranks that have ended
because a flag is wrong are not started again.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server.api import RunResult, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api as launcher

from . import run_network

__all__ = ["WRONG_USE", "arguments", "run"]

WRONG_USE = 2  # the exit code of argparse for a wrong flag; to start such ranks again would end in the same way
_LOGGERS = ("torch.distributed.run", "torch.distributed.elastic", "torch.distributed.launcher")


def arguments() -> argparse.ArgumentParser:
    """What `run` takes: torchrun's options, a script, and its arguments."""
    return torchrun.get_args_parser()


class _Agent(LocalElasticAgent):
    """Says why ranks are started again, and leaves it where it would not help."""

    def _monitor_workers(self, worker_group: Any) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state != WorkerState.FAILED:
            return result
        # The others have been ended by the launcher since; times are in whole seconds.
        consequence = -signal.SIGTERM
        rank, failure = min(
            result.failures.items(), key=lambda item: (item[1].exitcode == consequence, item[1].timestamp, item[0])
        )
        if failure.exitcode == WRONG_USE:
            self._remaining_restarts = 0
        if self._remaining_restarts > 0:
            most = worker_group.spec.max_restarts
            count = f"restart {most - self._remaining_restarts + 1} of {most}"
            _say(f"{_end_of(rank, failure.exitcode)}; all ranks are started again ({count})")
        return result


def run(args: argparse.Namespace) -> int:
    """Runs a script on several processes; the exit code is that of the rank that failed first, and 130 after Ctrl-C.

    The environment variable LOGLEVEL shows torchrun's own lines (LOGLEVEL=WARNING).
    """
    # Else ranks that are started again (`--max-restarts`) find, in the agent's store, the addresses of those that died.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if "LOGLEVEL" not in os.environ:
        _silence_stores()
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    names = vars(launcher)
    try:
        run_network.complete(args)
        names["LocalElasticAgent"] = _Agent
        torchrun.run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say so itself
            _say(_end_of(rank, failure.exitcode))
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except (RendezvousError, run_network.NetworkError) as error:
        _say(f"the hosts did not come together: {error}")
        return 1
    except SignalException as ended:
        return 128 + ended.sigval
    except KeyboardInterrupt:  # before torchrun has its handlers
        return 130
    finally:
        names["LocalElasticAgent"] = LocalElasticAgent
    return 0


def _silence_stores() -> None:
    """Leaves out the C++ stacks that every process prints which has lost a store: with rank 0, or with its host."""
    if os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR") == "ERROR":  # of the ranks; here torch has read it already
        with suppress(OSError, ValueError):
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
            ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2


def _end_of(rank: int, exitcode: int) -> str:
    how = f"was ended by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"failed with exit code {exitcode}"
    return f"rank {rank} {how}"


def _say(text: str) -> None:
    print(f"neuronx-dist run: {text}", file=sys.stderr, flush=True)

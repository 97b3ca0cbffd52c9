"""`neuronx-dist run --nproc-per-node 4 train.py`: torchrun, of which only what the ranks say is seen.

torchrun answers the exit code of a rank with a traceback of its own, 25 lines that bury what the rank said, and Ctrl-C
with a line for each process. Its options, environment variables and exit codes stay as they are.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

__all__ = ["arguments", "run"]

_LOGGERS = ("torch.distributed.run", "torch.distributed.elastic", "torch.distributed.launcher")


def arguments() -> argparse.ArgumentParser:
    """What `run` takes: torchrun's options, a script, and its arguments."""
    return torchrun.get_args_parser()


def run(args: argparse.Namespace) -> int:
    """Runs a script on several processes; the exit code is that of the rank that failed first, and 130 after Ctrl-C.

    The environment variable LOGLEVEL shows torchrun's own lines (LOGLEVEL=WARNING).
    """
    # Else ranks that are started again (`--max-restarts`) find, in the agent's store, the addresses of those that died.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if "LOGLEVEL" not in os.environ:
        for name in [name for name in logging.root.manager.loggerDict if name.startswith(_LOGGERS)]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        torchrun.run(args)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:  # it could not say so itself
            name = signal.Signals(-failure.exitcode).name
            print(f"neuronx-dist run: rank {rank} was ended by {name}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as ended:
        return 128 + ended.sigval
    except KeyboardInterrupt:  # before torchrun has its handlers
        return 130
    return 0

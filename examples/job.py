"""How train_llama.py starts and ends, in lines for people. Its first import: it needs nothing but Python.

Whoever leaves through here has said why, in one line, which is the last one under `neuronx-dist run`. torchrun itself
adds 25 lines of its own traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NAME = "train_llama"
RANK = int(os.environ.get("RANK", "0"))
WAIT = 10.0  # seconds in which the launcher ends the other ranks, once rank 0 has failed

_on_interrupt: Callable[[], str] = lambda: "before the first step; nothing was written"  # noqa: E731


def say(text: str) -> None:
    """A line of rank 0, at once."""
    if RANK == 0:
        print(text, flush=True)


def leave(message: str = "", code: int = 1) -> NoReturn:
    """Ends this process, and with it the job, after a line on stderr of rank 0; of another rank, if that alone fails.

    A code of 0 is a process that ends as others do.
    """
    if code == 0:
        sys.exit()
    if RANK != 0:  # the launcher ends all at the first that fails: that is rank 0, unless it has no reason to
        time.sleep(WAIT)
    if message:
        print(f"{NAME}: {message}" if RANK == 0 else f"{NAME}, rank {RANK}: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not by way of what other ranks are asked for when a process ends


def on_interrupt(describe: Callable[[], str]) -> None:
    """From now on Ctrl-C says `interrupted` and this: how far the run is, what it has written, how to go on."""
    global _on_interrupt
    _on_interrupt = describe


def _interrupted(*_: Any) -> NoReturn:
    """Leaves from the handler itself: an exception raised here may come up inside of C++, which ends by a core dump."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave(f"interrupted {_on_interrupt()}", 130)


def start() -> None:
    """Says what takes the first seconds, and takes over Ctrl-C: the other ranks end at once, wherever they wait."""
    signal.signal(signal.SIGINT, _interrupted if RANK == 0 else signal.SIG_DFL)
    if "--check" not in sys.argv:  # its report is all that is printed
        world = os.environ.get("WORLD_SIZE", "1")
        say(f"{NAME}: {world} process{'es' * (world != '1')} import{'s' * (world == '1')} torch and transformers ...")


if Path(sys.argv[0]).name == f"{NAME}.py":
    start()

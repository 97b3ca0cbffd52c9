"""How train_llama.py starts and ends, in lines for people. Its first import: it needs nothing but Python.

A launcher such as torchrun answers the exit code of its processes with 25 lines of its own traceback, and Ctrl-C with
one more for each process. Whoever leaves through here has said why, in one line, and ends the launcher before it does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

NAME = "train_llama"
RANK = int(os.environ.get("RANK", "0"))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", "0"))
WAIT = 60.0  # seconds that a rank waits for local rank 0, which ends the launcher

_on_interrupt: Callable[[], str] = lambda: "before the first step; nothing was written"  # noqa: E731


def say(text: str) -> None:
    """A line of rank 0, at once."""
    if RANK == 0:
        print(text, flush=True)


def leave(message: str = "", code: int = 1) -> NoReturn:
    """Ends this process, and with it the job, after a line on stderr of rank 0. All ranks call it.

    A code of 0 is a process that ends as others do.
    """
    if code == 0:
        sys.exit()
    if RANK == 0 and message:
        print(f"{NAME}: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    launcher = _launcher()
    if launcher is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # threads of this process miss the store that the launcher holds
        if LOCAL_RANK == 0:
            with suppress(OSError):
                os.kill(launcher, signal.SIGKILL)  # it makes a traceback of every other signal
            os._exit(code)
        until = time.monotonic() + WAIT  # who is the first to end with another code than 0 is answered
        while os.getppid() == launcher and time.monotonic() < until:
            time.sleep(0.05)
    os._exit(code)  # not by way of what other ranks are asked for when a process ends


def on_interrupt(describe: Callable[[], str]) -> None:
    """From now on Ctrl-C says `interrupted` and this: how far the run is, what it has written, how to go on."""
    global _on_interrupt
    _on_interrupt = describe


def _launcher() -> int | None:
    """The process of torchrun that started this one and writes where it writes; None if there is none."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    parent = os.getppid()
    try:
        words = Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        seen = os.path.samestat(os.fstat(2), os.stat(f"/proc/{parent}/fd/2"))
    except OSError:
        return None
    return parent if seen and any(word.endswith((b"torchrun", b"torch.distributed.run")) for word in words) else None


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

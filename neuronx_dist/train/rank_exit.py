"""Start and end of a rank of `neuronx-dist train`, as lines for people: refusals, signals, exit codes.

Whoever leaves through here has said why, in one line, which is the last one under `neuronx-dist run`. torchrun itself
adds 25 lines of its own traceback.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

__all__ = [
    "NAME",
    "WRONG_USE",
    "asked_to_end",
    "end_after_step",
    "is_restart",
    "launch",
    "launcher_rank",
    "launcher_size",
    "leave",
    "leave_interrupted",
    "leave_without",
    "on_interrupt",
    "say",
    "start",
]

NAME = "neuronx-dist train"
WRONG_USE = 2  # exit code: to start the same command again, as --max-restarts does, would end in the same way
WAIT = 10.0  # seconds in which the launcher ends the other ranks, once rank 0 has failed
NEWS = 1.5  # seconds in which all ranks have heard who was lost
AGAIN = 2.0  # seconds after which a signal is a second one: ranks may get the first from a launcher, too

_on_interrupt: Callable[[], str] = lambda: "before the first step; nothing was written"  # noqa: E731
_say: Callable[[str], Any] = print  # shows a hint beside the progress
_asked_to_end: tuple[int, float] | None = None  # the signal that asked this rank to end after its step, and when


def _of_launcher(*names: str) -> int | None:
    return next((int(os.environ[name]) for name in names if name in os.environ), None)


def launcher_rank() -> int:
    """Rank of this process by the variables of torchrun, srun or mpirun; 0 without them."""
    return _of_launcher("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK") or 0


def launcher_size() -> int | None:
    """Number of processes that torchrun, srun or mpirun has started; None: this process was started by none of them."""
    return _of_launcher("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")


def say(text: str) -> None:
    """A line of rank 0, at once."""
    if launcher_rank() == 0:
        print(text, flush=True)


def leave(message: str = "", code: int = 1, *, together: bool = False) -> NoReturn:
    """Ends this process, and with it the job, after a line on stderr of rank 0; of another rank, if that alone fails.

    A code of 0 is a process that ends as others do.

    Args:
        together: all ranks leave, so that none but rank 0 has something to say.
    """
    if code == 0:
        sys.exit()
    rank = launcher_rank()
    if rank != 0 and not together:  # the launcher ends all at the first that fails: that is rank 0, if it has a reason
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(WAIT)
    if message and not (rank != 0 and together):
        print(f"{NAME}: {message}" if rank == 0 else f"{NAME}, rank {rank}: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # not by way of what other ranks are asked for when a process ends


def on_interrupt(describe: Callable[[], str]) -> None:
    """From now on Ctrl-C says `interrupted` and this: how far the run is, what it has written, how to go on."""
    global _on_interrupt
    _on_interrupt = describe
    signal.signal(signal.SIGINT, _interrupted if launcher_rank() == 0 else signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _asked_to_end:
        leave_interrupted(_asked_to_end[0], describe())


def end_after_step(describe: Callable[[], str], say: Callable[[str], Any] = say) -> None:
    """From now on Ctrl-C and SIGTERM only make `asked_to_end` true; a second one ends the run, and says this."""
    global _on_interrupt, _say
    _on_interrupt, _say = describe, say
    signal.signal(signal.SIGINT, _end_after_step)
    signal.signal(signal.SIGTERM, _end_after_step)


def asked_to_end() -> int:
    """The signal that has asked this rank to end after its step; 0 if none has."""
    return _asked_to_end[0] if _asked_to_end else 0


def leave_interrupted(number: int, message: str) -> NoReturn:
    """Ends all ranks, each of which calls this, in answer to a signal."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    verb = "interrupted" if number == signal.SIGINT else f"ended by {signal.Signals(number).name}"
    leave(f"{verb} {message}", 128 + number, together=True)


def leave_without(lost: int | None, why: str) -> NoReturn:
    """Ends this rank because others have ended, as all that are left do; one of them says why."""
    number, _ = _asked_to_end or (0, 0.0)
    verb = f"ended by {signal.Signals(number).name}" if number else "ended"
    speaker = 1 if lost == 0 else 0
    if speaker == launcher_rank():
        time.sleep(NEWS)  # who leaves first is taken for lost by those who do not know of the other yet
        print(f"{NAME}: {verb} {_on_interrupt()}: {why}", file=sys.stderr)
    leave(code=128 + number if number else 1, together=True)


def _interrupted(number: int, _: Any) -> NoReturn:
    """Leaves from the handler itself: an exception raised here may come up inside of C++, which ends by a core dump."""
    leave_interrupted(number, _on_interrupt())


def _end_after_step(number: int, _: Any) -> None:
    global _asked_to_end
    now = time.monotonic()
    if _asked_to_end is None:
        _asked_to_end = number, now
        if number == signal.SIGINT:
            hint = threading.Timer(AGAIN, _say, ["ending after this step with a checkpoint; Ctrl-C again ends at once"])
            hint.daemon = True
            hint.start()
    elif now > _asked_to_end[1] + AGAIN:
        _interrupted(number, None)


def is_restart() -> bool:
    """Whether the launcher has started this process in the place of one that ended early (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def launch() -> list[str] | None:
    """Identifier of a launch: equal for all ranks of a host over all restarts, and different for other launches."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID")
    return None if run_id is None else [run_id, socket.gethostname(), str(os.getppid())]


def start(quiet: bool = False) -> None:
    """Says what takes the first seconds, and takes over Ctrl-C: the other ranks end at once, wherever they wait."""
    on_interrupt(_on_interrupt)
    if not quiet:
        size = launcher_size() or 1
        say(f"{NAME}: {size} process{'es' * (size != 1)} import{'s' * (size == 1)} torch and transformers ...")

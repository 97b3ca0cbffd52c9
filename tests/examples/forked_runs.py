"""Runs of the training example, one after another, in forks of one interpreter that has imported what they import.

    python -m tests.examples.forked_runs '[{"flags": ["--steps", "4"]}, ...]'

A run may have `ranks` (1), `environment`, `signals`, pairs of a part of a line and a signal that all its ranks get
when that line is seen, and `copies`, folders that its `--out` is copied to at its end. Printed is a JSON list of (exit
code of the first rank, output of all).
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

from tests.support.paths import EXAMPLES

SCRIPT = EXAMPLES / "train_llama.py"


def run(
    flags: list[str],
    ranks: int = 1,
    environment: dict[str, str] | None = None,
    signals: list[Any] | None = None,
    copies: list[str] | None = None,
) -> tuple[int, str]:
    shared = dict(environment or {})
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            shared |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE=str(ranks))
    read, write = os.pipe()
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            _become_rank(write, flags, {**shared, **own})
        children.append(child)
    os.close(write)
    waiting, text = list(signals or ()), ""
    with os.fdopen(read, errors="replace") as output:
        for line in output:
            text += line
            if waiting and waiting[0][0] in line:
                for child in children:
                    os.kill(child, waiting[0][1])
                waiting.pop(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for copy in copies or ():
        shutil.copytree(flags[flags.index("--out") + 1], copy)
    return codes[0], text


def _become_rank(output: int, flags: list[str], environment: dict[str, str]) -> NoReturn:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(environment)
    for name in [path.stem for path in EXAMPLES.glob("*.py")]:  # which look at the environment as they are imported
        sys.modules.pop(name, None)
    sys.argv = [str(SCRIPT), *flags]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(SCRIPT).parent))
    import matplotlib.figure  # noqa: F401
    import train_llama  # noqa: F401
    import transformers  # noqa: F401

    print(json.dumps([run(**each) for each in json.loads(sys.argv[1])]))

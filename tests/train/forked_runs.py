"""Runs of `neuronx-dist train`, one after another, in forks of one interpreter that has imported what they import.

    python -m tests.train.forked_runs '[{"flags": ["--steps", "4"]}, ...]'

A run may have `ranks` (1), `environment`, a `signal`, which its first rank gets as soon as it has printed `at`, and
`copies`, folders that its `--out` is copied to at its end. Printed is a JSON list of (exit code of the first rank,
output of all).
"""

from __future__ import annotations

import io
import json
import os
import shutil
import socket
import sys
from functools import partial
from typing import Any

from neuronx_dist import __main__
from tests.support import forked


def run(
    flags: list[str],
    ranks: int = 1,
    environment: dict[str, str] | None = None,
    signal: int = 0,
    at: str = "",
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
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            os.dup2(write, 1)
            os.dup2(write, 2)
            if signal and rank == 0:
                _signal_at(at, signal)
            forked.run_to_the_end(partial(_become_rank, flags, {**shared, **variables}))
        children.append(child)
    os.close(write)
    with os.fdopen(read, errors="replace") as output:
        text = output.read()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for copy in copies or ():
        shutil.copytree(flags[flags.index("--out") + 1], copy)
    return codes[0], text


def _signal_at(part: str, number: int) -> None:
    """This process signals itself when it prints a line with `part`."""
    write: Any = sys.stdout.write

    def write_and_signal(text: str) -> int:
        count: int = write(text)
        if part in text:
            sys.stdout.flush()
            os.kill(os.getpid(), number)
        return count

    sys.stdout.write = write_and_signal  # type: ignore[method-assign]


def _become_rank(flags: list[str], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.argv = ["neuronx-dist", "train", *flags]
    sys.exit(__main__.main())


if __name__ == "__main__":
    import matplotlib.figure  # noqa: F401
    import torch._dynamo
    import torch.distributed.tensor  # noqa: F401
    from transformers import AutoModelForCausalLM, GenerationMixin, LlamaForCausalLM  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import neuronx_dist.checkpoint.api
    import neuronx_dist.pipeline.run.executor  # noqa: F401
    from neuronx_dist.train import training_run
    from neuronx_dist.train.progress import loss_curve

    # What takes more time than the six steps of such a run: predicted memory, a sample of text, glyphs, expressions.
    training_run.estimate_memory = lambda *_, **__: None
    GenerationMixin.generate = lambda _, ids, **__: ids
    loss_curve([{"step": step, "loss": 1.5 * step, "held_out_loss": 2.5} for step in range(7)], io.BytesIO(), "a title")
    get_checkpoint_conversion_mapping("llama")
    print(json.dumps([run(**each) for each in json.loads(sys.argv[1])]))

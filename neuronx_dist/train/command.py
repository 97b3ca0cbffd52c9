"""`neuronx-dist train --tp 2 --pp 2`: joins the job of a launcher, or starts the ranks that the degrees take.

What cannot work is refused before processes start: flags, layout, sizes of the model, paths.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from ..comm.launchers import export_place
from ..lazy_names import lazy_names
from . import rank_exit
from .flags import check_flags, layout_of, model_shape, parser, processes_of

__all__ = ["arguments", "run"]

# Loaded where they are needed: models, checker and checkpoints take seconds, and a wrong flag needs none of them.
_late = lazy_names(
    __name__, {"auto_layout": "train", "run_command": "comm", "run_folder": "train", "training_run": "train"}
)

_DESCRIPTION = """\
Trains a Hugging Face causal LM on text, with tensor, sequence, pipeline, context, expert and data parallelism, ZeRO-1.
Without --model it is a small byte-level Llama, without --data the text is the source code of Python's library."""

_EXAMPLES = """\
examples:

  a laptop: one process, then 2 x 2 of them
  $ neuronx-dist train
  $ neuronx-dist train --tp 2 --pp 2 --steps 20

  the layout that is predicted to be the fastest on 4 ranks
  $ neuronx-dist train --nproc 4 --auto

  a host with 8 GPUs, from a folder of Hugging Face's; Ctrl-C ends the run with a checkpoint
  $ neuronx-dist train --nproc 8 --tp 2 --pp 2 --zero1 --dtype bfloat16 --model models/llama --out runs/mine

  the same run on 4 of them: another layout resumes it
  $ neuronx-dist train --nproc 4 --tp 4 --dtype bfloat16 --model models/llama --out runs/mine --resume

  on each of 2 hosts; or by srun, mpirun, torchrun
  $ neuronx-dist run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --nproc-per-node 8 \\
        -m neuronx_dist train --tp 8 --pp 2 --out /shared/runs/mine --save-every 100 --resume auto

  before a long run: the check of 64 ranks in this process, and the losses of all layouts of 4 ranks
  $ neuronx-dist train --tp 8 --pp 4 --check 64 --global-batch 64 --model models/llama
  $ neuronx-dist train --nproc 4 --verify --steps 10
"""

# Program of a started rank: `python -m neuronx_dist`, which Ctrl-C ends without a traceback while torch is imported.
_RANK = """import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.argv[0] = "neuronx-dist"
from neuronx_dist.__main__ import main
sys.exit(main())"""


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of `train`."""
    return parser(_DESCRIPTION, _EXAMPLES)


def run(args: argparse.Namespace) -> int:
    """Trains as a rank of a launcher's job, or starts ranks that do; returns the exit code.

    Raises:
        argparse.ArgumentError: flags, layout, model or paths cannot work; before any rank is started.
    """
    words = vars(args).pop("words")
    try:
        export_place()
        check_flags(args)
        started = rank_exit.launcher_size() if "RANK" in os.environ else None
        if started is not None and args.nproc not in (None, "auto", started):
            raise ValueError(f"--nproc {args.nproc}: the launcher has started {started} ranks; leave --nproc out")
        if started is not None and args.auto:
            rank_exit.say(_late("auto_layout").choose_layout(args, words, started)[0])
        if started is not None or (args.check is not None and not args.auto):
            return _train(args)
        if args.resume is not None:
            _late("run_folder").check_resume(args)
        size = processes_of(args, torch.accelerator.device_count())
        if args.auto:
            why, flags = _late("auto_layout").choose_layout(args, words, size)
            rank_exit.say(why)
            words = [*(word for word in words if word != "--auto"), *flags]
        layout = layout_of(args, size)
        layout.check(model_shape(args), data=args.data or (), out=args.out if args.resume is None else None)
    except ValueError as error:
        if rank_exit.launcher_rank() == 0:
            raise argparse.ArgumentError(None, str(error)) from None
        rank_exit.leave(str(error), rank_exit.WRONG_USE)
    if size == 1:
        return _train(args)
    rank_exit.say(f"{rank_exit.NAME}: {size} ranks start on this host")
    options = ["--standalone", "--nproc-per-node", str(size), "--no-python", sys.executable, "-u", "-c", _RANK, "train"]
    run_command = _late("run_command")
    ranks = run_command.arguments().parse_args(options)
    ranks.training_script_args += words  # which argparse would take for abbreviations of torchrun's options
    return int(run_command.run(ranks))


def _train(args: argparse.Namespace) -> int:
    """Trains as this rank, which takes over Ctrl-C before the imports that take seconds."""
    rank_exit.start(quiet=args.check is not None)  # the report of a check is all that is printed
    return int(_late("training_run").run_rank(args))

"""`neuronx-dist train --tp 2 --pp 2`: joins the job of a launcher, or starts the ranks that the degrees take.

What cannot work is refused before processes start: flags, layout, sizes of the model, paths.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch

from ..comm import run_command
from ..comm.launchers import export_place
from . import rank_exit
from .auto_layout import choose_layout
from .causal_lm import model_shape
from .flags import check_flags, layout_of, parser, processes_of
from .run_folder import check_resume
from .training_run import run_rank

__all__ = ["arguments", "run"]

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
            rank_exit.say(choose_layout(args, words, started)[0])
        if started is not None or (args.check is not None and not args.auto):
            return run_rank(args)
        check_resume(args)
        size = processes_of(args, torch.accelerator.device_count())
        if args.auto:
            why, flags = choose_layout(args, words, size)
            rank_exit.say(why)
            words = [*(word for word in words if word != "--auto"), *flags]
        layout = layout_of(args, size)
        layout.check(model_shape(args), data=args.data or (), out=args.out if args.resume is None else None)
    except ValueError as error:
        if rank_exit.launcher_rank() == 0:
            raise argparse.ArgumentError(None, str(error)) from None
        rank_exit.leave(str(error), rank_exit.WRONG_USE)
    if size == 1:
        return run_rank(args)
    rank_exit.say(f"{rank_exit.NAME}: {size} ranks start on this host")
    options = ["--standalone", "--nproc-per-node", str(size), "--no-python", sys.executable, "-u", "-c", _RANK, "train"]
    ranks = run_command.arguments().parse_args(options)
    ranks.training_script_args += words  # which argparse would take for abbreviations of torchrun's options
    return run_command.run(ranks)

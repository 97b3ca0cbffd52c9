"""`neuronx-dist compat train.py ...`: runs a script for NxD as it is."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from ..command_line import command_parser
from .spawned import serve_spawned_processes
from .stand_ins import install

__all__ = ["arguments", "run"]


def arguments() -> argparse.ArgumentParser:
    parser = command_parser(
        "Run a script that imports neuronx_distributed, and torch_xla, as it is. The names are this package's; where "
        "torch_xla is absent, its functions are served on this machine's device.",
        "examples:\n\n"
        "  $ neuronx-dist compat train.py --tensor_parallel_size 1\n"
        "  $ neuronx-dist run --nproc-per-node 4 -m neuronx_dist compat train.py --tensor_parallel_size 2\n"
        "  $ torchrun --nproc-per-node 4 -m neuronx_dist compat train.py --tensor_parallel_size 2\n\n"
        "The same by one line at the top of the script: import neuronx_dist.compat",
    )
    parser.add_argument("script", help="the script's path")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's arguments")
    return parser


def run(args: argparse.Namespace) -> int:
    if not os.path.isfile(args.script):
        what = "is a folder" if os.path.isdir(args.script) else "does not exist"
        raise argparse.ArgumentError(None, f"the script {args.script} {what}")
    install()
    serve_spawned_processes(args.script)
    sys.argv = [args.script, *args.args]
    sys.path[0] = os.path.dirname(os.path.abspath(args.script))
    runpy.run_path(args.script, run_name="__main__")
    return 0

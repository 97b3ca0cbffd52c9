"""The command `neuronx-dist`, also `python -m neuronx_dist`: `neuronx-dist check model.py:model_fn --mesh tp=4`."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import select
import sys
from typing import NoReturn, TextIO

import torch

__all__ = ["SUBCOMMANDS", "main"]

_NAME = "neuronx-dist"
# Subcommand -> the module with its `arguments()`, a parser, and `run(args) -> exit code`, and its text in `--help`.
SUBCOMMANDS = {
    "check": ("checking.command", "play a training step of every rank in this process, and compare them"),
    "compat": ("compat.command", "run a script for NeuronX Distributed as it is"),
    "convert": (
        "checkpoint.convert.convert_command",
        "weights between Hugging Face, NeuronX Distributed and save_checkpoint",
    ),
    "doctor": ("comm.doctor.command", "look at versions, devices, backends and network, and try two processes"),
    "plan": ("planner.command", "find the fastest layouts of a model on a cluster, with their time and memory"),
    "run": ("comm.run_command", "run a script on several processes, as torchrun does, and show only what it says"),
    "timeline": ("pipeline.timeline.command", "draw a pipeline's schedules, or a recorded step, for web or terminal"),
    "train": ("train.command", "train a causal LM on text in any layout, on ranks that it starts, or a launcher's"),
}


_EXAMPLES = f"""\
examples:

  $ {_NAME} train --tp 2 --pp 2                        # a small Llama on 4 ranks of this host
  $ {_NAME} run --nproc-per-node 4 train.py            # your script on 4 ranks
  $ {_NAME} check model.py:build --mesh dp=2,tp=4      # its program on 8 ranks, without processes
  $ {_NAME} doctor                                     # is this host ready?
"""


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code: 0 success, 1 a problem, 2 wrong usage. Without words it prints help.

    141, as of a program that SIGPIPE ends: nobody reads the output any more, as in `neuronx-dist plan ... | head`.
    """
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not unread:
            raise  # another pipe
        for stream in unread:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # where the exit flushes what is left
        return 141
    return code


def _is_unread(stream: TextIO) -> bool:
    """Returns whether a stream is a pipe whose reader has ended; what is written to it may be gone from its buffer."""
    poll = select.poll()
    poll.register(stream, 0)  # errors are reported always
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _run(argv: list[str]) -> int:
    try:
        if not argv or argv[0] not in SUBCOMMANDS:
            _parser().parse_args(argv or ["--help"])  # `parse_args` exits: help, the version, or an error
        module = importlib.import_module(f"{__package__}.{SUBCOMMANDS[argv[0]][0]}")  # other subcommands are not loaded
        parser: argparse.ArgumentParser = module.arguments()
        parser.prog = f"{_NAME} {argv[0]}"
        args = parser.parse_args(argv[1:])
    except SystemExit as ended:  # 0 for help, 2 for an error
        return int(ended.code or 0)
    except KeyboardInterrupt:  # while the subcommand is imported
        return 130
    try:
        return int(module.run(args))
    except argparse.ArgumentError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Names the subcommand that was meant, in place of the list of all."""
        word = re.search(r"invalid choice: '(.*?)'", message)
        if word is not None:
            near = difflib.get_close_matches(word[1], SUBCOMMANDS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose from {', '.join(SUBCOMMANDS)}"
            message = f"there is no command {word[1]!r}: {advice}"
        self.exit(2, f"{_NAME}: {message} ({_NAME} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=_NAME,
        description=f"Tools of neuronx_dist. `{_NAME} COMMAND --help` says more of each, with examples.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.import_module(str(__package__)).__version__
    parser.add_argument("--version", action="version", version=f"{_NAME} {version}, torch {torch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, summary) in SUBCOMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())

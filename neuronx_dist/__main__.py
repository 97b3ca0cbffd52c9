"""The command `neuronx-dist`, also `python -m neuronx_dist`: `neuronx-dist check model.py:model_fn --mesh tp=4`."""

from __future__ import annotations

import argparse
import importlib
import sys

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
}


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code: 0 success, 1 a problem, 2 wrong usage."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if not argv or argv[0] not in SUBCOMMANDS:
            _help().parse_args(argv)  # `parse_args` exits: help, or an error
        module = importlib.import_module(f"{__package__}.{SUBCOMMANDS[argv[0]][0]}")  # other subcommands are not loaded
        parser: argparse.ArgumentParser = module.arguments()
        parser.prog = f"{_NAME} {argv[0]}"
        args = parser.parse_args(argv[1:])
    except SystemExit as ended:  # 0 for help, 2 for an error
        return int(ended.code or 0)
    try:
        return int(module.run(args))
    except argparse.ArgumentError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


def _help() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_NAME, description=f"Tools of neuronx_dist. `{_NAME} COMMAND --help` says more of each."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (_, summary) in SUBCOMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


if __name__ == "__main__":
    sys.exit(main())

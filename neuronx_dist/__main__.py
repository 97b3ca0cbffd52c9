"""The command `neuronx-dist`, also `python -m neuronx_dist`: `neuronx-dist check model.py:model_fn --mesh tp=4`."""

from __future__ import annotations

import argparse
import importlib
import sys

__all__ = ["SUBCOMMANDS", "main"]

# Subcommand -> the module with its `add_arguments(parser)` and `run(args) -> exit code`, and what `--help` says of it.
SUBCOMMANDS = {
    "check": ("checking.command", "play a training step of every rank in this process, and compare them"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns its exit code: 0 all is well, 1 a problem, 2 a command that cannot be understood."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="neuronx-dist", description="Tools of neuronx_dist. `neuronx-dist COMMAND --help` says more of each."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, summary) in SUBCOMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name in argv[:1]:  # the others are not loaded
            module = importlib.import_module(f"{__package__}.{module_name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    try:
        args = parser.parse_args(argv)
    except SystemExit as ended:  # help is 0, a mistake 2
        return int(ended.code or 0)
    try:
        return int(args.run(args))
    except argparse.ArgumentError as error:
        print(f"{parser.prog} {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

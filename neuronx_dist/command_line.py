"""What the commands share: how their parsers are made, and a number of at least 1 is read."""

from __future__ import annotations

import argparse

__all__ = ["command_parser", "count"]


def command_parser(description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help ends with `examples`, line by line as they are written."""
    return argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def count(text: str) -> int:
    """The type of an option that is a number of things: `add_argument("--stages", type=count)`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)

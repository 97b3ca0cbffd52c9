"""Common code of the commands: making parsers, and reading a number of at least 1."""

from __future__ import annotations

import argparse

__all__ = ["command_parser", "count"]


def command_parser(description: str, examples: str) -> argparse.ArgumentParser:
    """Returns a parser whose help ends with `examples`, line by line."""
    return argparse.ArgumentParser(
        description=description, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def count(text: str) -> int:
    """Type of an option that counts something: `add_argument("--stages", type=count)`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text}")
    return int(text)

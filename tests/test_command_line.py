"""Shared parts of the commands."""

from __future__ import annotations

import argparse

import pytest

from neuronx_dist.command_line import command_parser, count


def test_examples_stand_in_the_help_as_they_are_written() -> None:
    examples = "examples:\n\n  $ neuronx-dist draw   # two   spaces\n  $ neuronx-dist draw --again\n"
    text = command_parser("Draws what there is.", examples).format_help()
    assert "Draws what there is." in text and text.endswith(examples)


def test_a_count_is_an_integer_of_at_least_1() -> None:
    assert [count("1"), count("12")] == [1, 12]
    for text in ("0", "-1", "1.5", "two", ""):
        with pytest.raises(argparse.ArgumentTypeError, match=f"an integer of at least 1, got {text}$"):
            count(text)

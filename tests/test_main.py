"""The command `neuronx-dist`: what it does with its words, and the exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import sys
from functools import cache
from types import ModuleType
from typing import Any

import pytest
import torch

import neuronx_dist
from neuronx_dist import __main__ as command


def test_help_names_every_subcommand(capsys: Any) -> None:
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: neuronx-dist [-h] [--version] COMMAND ...")
    for name, (_, summary) in command.SUBCOMMANDS.items():
        assert f"    {name} " in out and summary.split(",")[0][:30] in " ".join(out.split())


def test_without_words_it_prints_help(capsys: Any) -> None:
    assert command.main([]) == 0
    assert "COMMAND ..." in capsys.readouterr().out
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"neuronx-dist {neuronx_dist.__version__}, torch {torch.__version__}\n"


@pytest.mark.parametrize(
    "words, message",
    [
        (["trian"], "there is no command 'trian': did you mean train? (neuronx-dist --help)\n"),
        (["draw"], "there is no command 'draw': choose from check, compat, "),
        (["--no"], "required: COMMAND (neuronx-dist --help)\n"),
    ],
)
def test_a_command_that_cannot_be_understood(words: list[str], message: str, capsys: Any) -> None:
    assert command.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("neuronx-dist: ") and message in error


def examples_of(text: str) -> list[list[str]]:
    """Words of the lines of a help text that begin with `$`, those that a backslash continues joined."""
    lines = re.findall(r"^ *\$ (.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("name", [None, *command.SUBCOMMANDS])
def test_examples_in_the_help_can_be_parsed(name: str | None, capsys: Any) -> None:
    assert command.main([name, "--help"] if name else ["--help"]) == 0
    examples = examples_of(capsys.readouterr().out)
    assert len(examples) >= 2, f"{name} --help shows no examples"
    for program, *words in examples:
        if program != "neuronx-dist":  # another launcher, of `-m neuronx_dist ...`
            words = words[words.index("neuronx_dist") + 1 :]
        while words:
            assert name is None or words[0] in (name, "run"), words
            args = parsers(words[0]).parse_args(words[1:])
            is_nested = words[0] == "run" and args.module and args.training_script == "neuronx_dist"
            words = args.training_script_args if is_nested else []


@cache
def parsers(name: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = importlib.import_module(
        f"neuronx_dist.{command.SUBCOMMANDS[name][0]}"
    ).arguments()
    return parser


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_every_subcommand_has_help_of_its_own(name: str, capsys: Any) -> None:
    assert command.main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: neuronx-dist {name} ")
    assert command.main([name, "--no-such-option"]) == 2
    assert f"usage: neuronx-dist {name} " in capsys.readouterr().err


def test_words_and_exit_codes_go_through(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[argparse.Namespace] = []

    def arguments() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser()
        parser.add_argument("--code", type=int)
        return parser

    def run(args: argparse.Namespace) -> int:
        seen.append(args)
        if args.code == 9:
            raise argparse.ArgumentError(None, "there is no nine")
        return int(args.code)

    module: Any = ModuleType("neuronx_dist.made_up.tool")
    module.arguments, module.run = arguments, run
    monkeypatch.setitem(command.SUBCOMMANDS, "tool", ("made_up.tool", "does nothing"))
    imported: list[str] = []
    monkeypatch.setattr(importlib, "import_module", lambda name: imported.append(name) or module)
    assert [command.main(["tool", "--code", str(code)]) for code in (0, 1, 5)] == [0, 1, 5]
    assert command.main(["tool", "--code", "9"]) == 2
    assert capsys.readouterr().err == "neuronx-dist tool: there is no nine\n"
    monkeypatch.setattr(sys, "argv", ["neuronx-dist", "tool", "--code", "3"])
    assert command.main() == 3
    assert [args.code for args in seen] == [0, 1, 5, 9, 3] and {*imported} == {"neuronx_dist.made_up.tool"}


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("lines", [1, 10_000], ids=["at the end", "in between"])
def test_a_reader_that_ends_is_no_error(stream: str, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe whose reader has ended, as `head` does: the command sees it when its buffer is full, or at the end."""

    def run(args: argparse.Namespace) -> int:
        for _ in range(lines):
            print("words", file=getattr(sys, stream))
        return 0

    module: Any = ModuleType("neuronx_dist.made_up.tool")
    module.arguments, module.run = argparse.ArgumentParser, run
    monkeypatch.setitem(command.SUBCOMMANDS, "tool", ("made_up.tool", "does nothing"))
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", buffering=1 if stream == "stderr" else -1) as unread, monkeypatch.context() as patch:
        patch.setattr(sys, stream, unread)
        assert command.main(["tool"]) == 141
        print("more words, that go nowhere", file=unread, flush=True)


def test_a_pipe_of_the_command_that_breaks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: argparse.Namespace) -> int:
        raise BrokenPipeError(32, "of a socket")

    module: Any = ModuleType("neuronx_dist.made_up.tool")
    module.arguments, module.run = argparse.ArgumentParser, run
    monkeypatch.setitem(command.SUBCOMMANDS, "tool", ("made_up.tool", "does nothing"))
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    with pytest.raises(BrokenPipeError, match="of a socket"):
        command.main(["tool"])

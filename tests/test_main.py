"""The command `neuronx-dist`: what it does with its words, and the exit codes."""

from __future__ import annotations

import argparse
import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

from neuronx_dist import __main__ as command


def test_help_names_every_subcommand(capsys: Any) -> None:
    assert command.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: neuronx-dist [-h] COMMAND ...")
    for name, (_, summary) in command.SUBCOMMANDS.items():
        assert f"    {name} " in out and summary.split(",")[0][:30] in " ".join(out.split())


@pytest.mark.parametrize(
    "words, message", [([], "required: COMMAND"), (["draw"], "invalid choice: 'draw'"), (["--no"], "required: COMMAND")]
)
def test_a_command_that_cannot_be_understood(words: list[str], message: str, capsys: Any) -> None:
    assert command.main(words) == 2
    assert message in capsys.readouterr().err


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

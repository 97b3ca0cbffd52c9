"""examples/parallelize.py in a world of one: what is wrong with its options is said in a line.

On two processes: tests/parallelize/test_processes.py.
"""

from __future__ import annotations

import runpy
import sys

import pytest

from tests.support.paths import EXAMPLES


def end_of(monkeypatch: pytest.MonkeyPatch, flags: str) -> object:
    monkeypatch.setattr(sys, "argv", ["parallelize.py", *flags.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "parallelize.py"), run_name="__main__")
    return end.value.code


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--policy foo", "parallelize.py: unknown policy 'foo'"),
        ("--plan-ngpus 2", "parallelize.py: ComputeConfig: runtime_ngpus=1 is not a multiple of plan_ngpus=2"),
    ],
)
def test_options_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, flags: str, words: str) -> None:
    assert words in str(end_of(monkeypatch, f"--model conv {flags}"))


@pytest.mark.parametrize("flags", ["--steps 0", "--plan-ngpus -1", "--model bert"])
def test_options_that_are_none(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: str) -> None:
    assert end_of(monkeypatch, flags) == 2
    assert flags.split()[1] in capsys.readouterr().err


@pytest.mark.slow
def test_a_world_of_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", "parallelize.py --model conv --steps 1 --verify --explain".split())
    runpy.run_path(str(EXAMPLES / "parallelize.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert "conv, policy autodist, ranks: 1, losses: [" in output and "the program takes " in output
    assert output.endswith("training in one process gives the same weights\n")

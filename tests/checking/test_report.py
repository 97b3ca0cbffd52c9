"""What a report prints: one line if all is well, details on request, everything as JSON."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

import neuronx_dist
from neuronx_dist.checking.report import Problem, Report

PACKAGE = str(Path(neuronx_dist.__file__).parent)
HERE = os.path.join(os.getcwd(), "scripts", "model.py")


def report(**more) -> Report:
    known = dict(operators=27, collectives=2, programs=1, runs=2, seconds=1.5)
    return Report({"pp": 1, "dp": 2, "cp": 1, "tp": 4}, **{**known, **more})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_what_is_ok_is_one_line_that_says_what_was_proven():
    assert str(report()) == "check ok: 8 ranks, level G: gradients and collectives agree"
    assert str(report(level=None)) == "check ok: 8 ranks, types not checked: collectives agree"
    many = Report({"pp": 4, "dp": 8, "cp": 1, "tp": 8}, trusted=["a.py:1: x", "a.py:2: y"], programs=8)
    assert str(many) == (
        "check ok: 256 ranks, level G: gradients, collectives and pipeline messages agree; 2 trusted declarations "
        "(report.details() lists them)"
    )
    assert many.summary("--details").endswith("2 trusted declarations (--details lists them)")


def test_where_something_was_assumed_running_it_with_values_is_recommended_by_name():
    assumed = report(assumed=[f"{HERE}:3: x is V"])
    assert "1 assumption (numeric=True tests with values)" in str(assumed)
    assert "assumed, not proven; numeric=True runs it with values" in assumed.details()
    wrong = report(assumed=[f"{HERE}:3: x is V"], problems=[Problem("types", "no")])
    assert "1 assumption: numeric=True tests with values" in str(wrong)
    run = report(assumed=[f"{HERE}:3: x is V"], numeric=True)
    assert "numeric=True" not in str(run) + run.details() and "1 assumption" in str(run)


def test_details_have_lines_with_paths_as_seen_from_here():
    text = report(
        assumed=[f"{HERE}:3: x is V"],
        trusted=[f"{PACKAGE}/parallel_layers/embedding.py:7: trusted"],
        differences=["ranks 0 and 1 differ"],
        unchecked=["pp"],
        notes=["loss and 4 gradients equal those of one process"],
    ).details()
    assert "\n    scripts/model.py:3: x is V" in text and "\n    neuronx_dist/parallel_layers/embedding.py:7" in text
    assert os.getcwd() not in text and "ranks 0 and 1 differ" in text and ": pp" in text and "4 gradients" in text


def test_json_keeps_whole_paths_and_all_fields():
    found = json.loads(report(assumed=[f"{HERE}:3: x is V"]).to_json())
    assert found["assumed"] == [f"{HERE}:3: x is V"] and found["numeric"] is False
    assert {"operators", "collectives", "world_size", "programs", "runs", "differences", "unchecked_axes"} <= {*found}


def test_a_problem_is_told_with_paths_as_seen_from_here():
    text = str(report(problems=[Problem("types", f"add at {HERE}:3 is wrong", (0,), (f"{HERE}:3",))]))
    assert text.startswith("1 problem found:") and "add at scripts/model.py:3 is wrong" in text
    assert "checked: 27 operators, 2 collectives, 8 ranks with one program, level G" in text


@pytest.mark.parametrize(("no_color", "terminal", "green"), [("", True, True), ("1", True, False), ("", False, False)])
def test_ok_is_green_on_a_terminal_only_and_not_under_no_color(monkeypatch, no_color, terminal, green):
    monkeypatch.setenv("NO_COLOR", no_color)
    file = Terminal() if terminal else io.StringIO()
    report().show(file)
    expected = str(report())
    assert file.getvalue() == (f"\033[32m{expected}\033[0m\n" if green else f"{expected}\n")


def test_problems_are_not_green(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    file = Terminal()
    report(problems=[Problem("types", "no")]).show(file)
    assert "\033" not in file.getvalue()


def test_details_of_what_failed_say_once_what_was_covered():
    failed = report(problems=[Problem("types", "no")], assumed=["a.py:1: x is V"])
    assert failed.details().count("27 operators") == 1 and "played in 2 runs" in failed.details()
    assert report().details().count("27 operators") == 1


def test_the_command_line_names_its_own_option():
    for problems in ([], [Problem("types", "no")]):
        for details in (False, True):
            file = io.StringIO()
            assumed = report(problems=problems, assumed=["a.py:1: x is V"])
            assumed.show(file, details=details, hint="--details", numeric="--numeric")
            assert "--numeric" in file.getvalue() and "numeric=True" not in file.getvalue()
